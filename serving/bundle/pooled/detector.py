"""A task's detector: the distance of an image from each of the task's classes, which never changes later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.bundle.pooled.classifier import Floats, checked, expanded
from serving.bundle.pooled.float16_rows import restored, rounded, stored
from serving.bundle.pooled.projection import Projection
from serving.bundle.pooled.settings import Standardised
from serving.bundle.pooled.solution import Solution

Array = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Detector:
    """The distance from a class is |rows (x - m)|^2 + weights (phi(x) - m_phi) + bias; higher means more unknown.

    All summands of an unknown score have this form, so their sum has it too. A detector of the relative score has one
    row for each class that was known when it was made, so its matrices are rounded to 16 bits per number.
    """

    projection: Projection
    class_ids: NDArray[np.int64]  # [classes], those of one task
    center: Floats  # [length], m_phi; its first numbers are m
    rows: Floats  # [any number, dim]
    weights: Floats  # [classes, length]
    bias: Floats  # [classes]

    @classmethod
    def of(cls, solution: Solution, summands: Sequence[Standardised], class_ids: NDArray[np.integer[Any]]) -> Detector:
        """The distances from some of the classes of a solution, by a sum of standardised scores."""
        lda, ridge, statistics = solution.lda, solution.ridge, solution.statistics
        dim, columns = statistics.projection.dim, np.searchsorted(statistics.class_ids, class_ids)
        center = statistics.sums.sum(axis=0) / statistics.images
        weights, bias = np.zeros((len(columns), statistics.projection.length)), np.zeros(len(columns))
        rows = np.zeros((0, dim))
        for each in summands:
            bias -= each.center / each.scale
            if each.name == "ridge":
                weights -= ridge.weights[columns] / each.scale
                bias -= ridge.outputs(center)[columns] / each.scale
                continue
            factor = (1 if each.name == "lda" else 2) / each.scale
            weights[:, :dim] -= factor * lda.weights[columns]
            bias -= factor * lda.bias[columns]
            if each.name == "lda":
                # (x - m / 2)' S_w^-1 m, which all classes share: the part with x, and the constant.
                weights[:, :dim] -= factor * lda.pull
                bias -= factor * (lda.center @ lda.pull) / 2
            else:
                rows = lda.relative_rows / np.sqrt(each.scale)
        needed = statistics.projection if any(each.name == "ridge" for each in summands) else Projection(dim, 0)
        return cls(
            projection=needed,
            class_ids=np.asarray(class_ids, np.int64),
            center=center[: needed.length].astype(np.float32),
            rows=rounded(rows),
            weights=rounded(weights[:, : needed.length]),
            bias=bias.astype(np.float32),
        )

    def distances(self, encoded: Array) -> Floats:
        """[n, classes] of vectors [n, dim], each row computed alone."""
        vectors = checked(encoded, self.projection)
        distances = np.empty((len(vectors), len(self.class_ids)), np.float32)
        for number, row in enumerate(vectors):
            distances[number] = self.row_distances(expanded(self.projection, row))
        return distances

    def row_distances(self, phi: Floats) -> Floats:
        """[classes] of one expanded vector; what is longer than the detector needs is ignored."""
        centred = phi[: len(self.center)] - self.center
        along = self.rows @ centred[: self.projection.dim]
        distances: Floats = along @ along + self.weights @ centred + self.bias
        return distances

    def expanded_distances(self, phi: Array) -> Floats:
        """[n, classes] of expanded vectors [n, length], all at once; the last bits depend on how many there are."""
        centred = np.asarray(phi[:, : len(self.center)], np.float32) - self.center
        along = centred[:, : self.projection.dim] @ self.rows.T
        distances: Floats = (along * along).sum(axis=1)[:, None] + centred @ self.weights.T + self.bias
        return distances

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Everything as arrays, for a file."""
        return {
            "projection": np.array([self.projection.dim, self.projection.rows, self.projection.seed], dtype=np.int64),
            "class_ids": self.class_ids,
            "center": self.center,
            **stored("rows", self.rows),
            **stored("weights", self.weights),
            "bias": self.bias,
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> Detector:
        """The detector of `to_arrays`, with the same distances to the bit."""
        return cls(
            projection=Projection(*map(int, arrays["projection"])),
            class_ids=arrays["class_ids"],
            center=arrays["center"],
            rows=restored("rows", arrays),
            weights=restored("weights", arrays),
            bias=arrays["bias"],
        )
