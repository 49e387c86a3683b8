"""The pooled classifier: small arrays that a server evaluates with numpy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.bundle.pooled.forms import LowRankForm, PreparedForm
from serving.bundle.pooled.projection import Projection
from serving.bundle.pooled.settings import PooledSettings
from serving.bundle.pooled.solution import class_distances, discriminant, ridge_weights
from serving.bundle.pooled.statistics import Statistics

Array = NDArray[np.floating[Any]]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class PooledClassifier:
    """Linear discriminant analysis and ridge regression, mixed to logits, and a distance from every class.

    Columns are the classes in ascending order of their ids. Softmax over all logits of a row is the posterior. A higher
    distance means more unknown.
    """

    projection: Projection
    settings: PooledSettings
    class_ids: NDArray[np.int64]  # [classes]
    center: Floats  # [dim]
    lda_weights: Floats  # [classes, dim]
    lda_bias: Floats  # [classes]
    ridge_weights: Floats  # [classes, length]
    forms: Mapping[str, LowRankForm]  # by unknown score

    @classmethod
    def fit(cls, statistics: Statistics, settings: PooledSettings) -> PooledClassifier:
        """The classifier of all classes in the statistics."""
        lda = discriminant(statistics, settings.shrinkage)
        variances = np.diag(lda.within)
        forms: dict[str, LowRankForm] = {
            name: LowRankForm.of(matrix, variances, settings.rank)
            for name in settings.unknown_names
            if (matrix := lda.form(name)) is not None
        }
        return cls(
            projection=statistics.projection,
            settings=settings,
            class_ids=statistics.class_ids.copy(),
            center=lda.center.astype(np.float32),
            lda_weights=lda.weights.astype(np.float32),
            lda_bias=lda.bias.astype(np.float32),
            ridge_weights=ridge_weights(statistics, settings.ridge).astype(np.float32),
            forms=forms,
        )

    @property
    def classes(self) -> int:
        return len(self.class_ids)

    def outputs(self, encoded: Array) -> dict[str, Floats]:
        """`logits` and `distances` [n, classes] of vectors [n, dim].

        Rows are computed one by one: matrix products round differently for batches of different sizes, and an answer
        must not depend on the other images of its batch.
        """
        rows = np.ascontiguousarray(encoded, dtype=np.float32)
        if rows.ndim != 2 or rows.shape[1] != self.projection.dim:
            raise ValueError(f"outputs: vectors have shape {rows.shape}; allowed: [n, {self.projection.dim}]")
        logits = np.empty((len(rows), self.classes), np.float32)
        distances = np.empty_like(logits)
        for number, row in enumerate(rows):
            logits[number], distances[number] = self._row(row)
        return {"logits": logits, "distances": distances}

    def _row(self, row: Floats) -> tuple[Array, Array]:
        centred = row - self.center
        lda = (self.lda_weights @ centred + self.lda_bias).astype(np.float64)
        ridge = (self.ridge_weights @ self.projection.expand(row[None])[0].astype(np.float32)).astype(np.float64)
        forms = {name: np.array([form(centred)]) for name, form in self._prepared.items()}
        logits, distances = combine(self.settings, lda[None], ridge[None], forms)
        return logits[0], distances[0]

    @cached_property
    def _prepared(self) -> dict[str, PreparedForm]:
        return {name: form.prepared() for name, form in self.forms.items()}

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Everything as arrays, for a file; the settings are a JSON text in bytes."""
        arrays: dict[str, NDArray[Any]] = {
            "projection": np.array([self.projection.dim, self.projection.rows, self.projection.seed], dtype=np.int64),
            "settings": np.frombuffer(self.settings.model_dump_json().encode(), dtype=np.uint8),
            "class_ids": self.class_ids,
            "center": self.center,
            "lda_weights": self.lda_weights,
            "lda_bias": self.lda_bias,
            "ridge_weights": self.ridge_weights,
        }
        for name, form in self.forms.items():
            arrays |= form.to_arrays(f"form.{name}")
        return arrays

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> PooledClassifier:
        """The classifier of `to_arrays`, with the same outputs to the bit."""
        settings = PooledSettings.model_validate_json(arrays["settings"].tobytes())
        forms: dict[str, LowRankForm] = {
            name: LowRankForm.from_arrays(arrays, f"form.{name}")
            for name in settings.unknown_names
            if f"form.{name}.scale" in arrays
        }
        return cls(
            projection=Projection(*map(int, arrays["projection"])),
            settings=settings,
            class_ids=arrays["class_ids"],
            center=arrays["center"],
            lda_weights=arrays["lda_weights"],
            lda_bias=arrays["lda_bias"],
            ridge_weights=arrays["ridge_weights"],
            forms=forms,
        )


def combine(settings: PooledSettings, lda: Array, ridge: Array, forms: Mapping[str, Array]) -> tuple[Array, Array]:
    """Logits and distances [n, classes] from the outputs of both classifiers [n, classes] and the forms, each [n]."""
    mixed = (1 - settings.mix) * _centred(lda) / settings.lda_scale
    mixed = mixed + settings.mix * _centred(ridge) / settings.ridge_scale
    distances = sum(
        (class_distances(each.name, lda, ridge, forms) - each.center) / each.scale for each in settings.unknown
    )
    return mixed / settings.temperature, np.asarray(distances)


def _centred(outputs: Array) -> Array:
    centred: Array = outputs - outputs.mean(axis=1, keepdims=True)
    return centred
