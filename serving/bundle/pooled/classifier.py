"""The pooled classifier: one matrix that a server multiplies with numpy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.bundle.pooled.projection import Projection
from serving.bundle.pooled.settings import PooledSettings
from serving.bundle.pooled.solution import Solution
from serving.bundle.pooled.statistics import Statistics

Array = NDArray[np.floating[Any]]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class PooledClassifier:
    """The logits of all classes: linear discriminant analysis and ridge regression, mixed and calibrated.

    Columns are the classes in ascending order of their ids. Softmax over all logits of a row is the posterior.
    """

    projection: Projection
    settings: PooledSettings
    class_ids: NDArray[np.int64]  # [classes]
    center: Floats  # [length]
    weights: Floats  # [classes, length]
    bias: Floats  # [classes]

    @classmethod
    def fit(cls, statistics: Statistics, settings: PooledSettings) -> PooledClassifier:
        """The classifier of all classes in the statistics."""
        return cls.of(Solution.of(statistics, settings), settings)

    @classmethod
    def of(cls, solution: Solution, settings: PooledSettings) -> PooledClassifier:
        """Both classifiers of a solution are linear in phi(x), so their mix is one matrix."""
        lda, ridge, statistics = solution.lda, solution.ridge, solution.statistics
        center = statistics.sums.sum(axis=0) / statistics.images
        shares = (1 - settings.mix) / lda.margin, settings.mix / ridge.margin
        weights = shares[1] * ridge.weights
        weights[:, : statistics.projection.dim] += shares[0] * lda.weights
        bias = shares[0] * lda.bias + shares[1] * ridge.outputs(center)
        # What all classes have in common makes no difference to softmax.
        weights, bias = weights - weights.mean(axis=0), bias - bias.mean()
        return cls(
            projection=statistics.projection,
            settings=settings,
            class_ids=statistics.class_ids.copy(),
            center=center.astype(np.float32),
            weights=(weights / settings.temperature).astype(np.float32),
            bias=(bias / settings.temperature).astype(np.float32),
        )

    @property
    def classes(self) -> int:
        return len(self.class_ids)

    def logits(self, encoded: Array) -> Floats:
        """[n, classes] of vectors [n, dim].

        Rows are computed one by one: matrix products round differently for batches of different sizes, and an answer
        must not depend on the other images of its batch.
        """
        rows = checked(encoded, self.projection)
        logits = np.empty((len(rows), self.classes), np.float32)
        for number, row in enumerate(rows):
            logits[number] = self.row_logits(expanded(self.projection, row))
        return logits

    def row_logits(self, phi: Floats) -> Floats:
        """[classes] of one expanded vector; what is longer than the classifier needs is ignored."""
        logits: Floats = self.weights @ (phi[: len(self.center)] - self.center) + self.bias
        return logits

    def expanded_logits(self, phi: Array) -> Floats:
        """[n, classes] of expanded vectors [n, length], all at once; the last bits depend on how many there are."""
        centred = np.asarray(phi[:, : len(self.center)], np.float32) - self.center
        return (centred @ self.weights.T + self.bias).astype(np.float32, copy=False)

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Everything as arrays, for a file; the settings are a JSON text in bytes."""
        return {
            "projection": np.array([self.projection.dim, self.projection.rows, self.projection.seed], dtype=np.int64),
            "settings": np.frombuffer(self.settings.model_dump_json().encode(), dtype=np.uint8),
            "class_ids": self.class_ids,
            "center": self.center,
            "weights": self.weights,
            "bias": self.bias,
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> PooledClassifier:
        """The classifier of `to_arrays`, with the same logits to the bit."""
        return cls(
            projection=Projection(*map(int, arrays["projection"])),
            settings=PooledSettings.model_validate_json(arrays["settings"].tobytes()),
            class_ids=arrays["class_ids"],
            center=arrays["center"],
            weights=arrays["weights"],
            bias=arrays["bias"],
        )


def checked(encoded: Array, projection: Projection) -> Floats:
    """Vectors [n, dim] in float32."""
    rows = np.ascontiguousarray(encoded, dtype=np.float32)
    if rows.ndim != 2 or rows.shape[1] != projection.dim:
        raise ValueError(f"vectors have shape {rows.shape}; allowed: [n, {projection.dim}]")
    return rows


def expanded(projection: Projection, row: Floats) -> Floats:
    """phi of one vector, [length]."""
    return row if projection.rows == 0 else projection.expand(row[None])[0].astype(np.float32)
