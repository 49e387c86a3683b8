"""What classifies the encoded vectors of a bundle: one classifier for all tasks, and one frozen detector per task.

The classifier is made of statistics over all tasks, so its logits change with every task that is learned. Whether an
image is known rests on scores of each task's own images, which are stored when the task is learned: they mean something
only beside distances that are computed in the same way for ever. So a task keeps its part of the classifier as it was
then, and its distances stay bit-identical.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.bundle.pooled import PooledClassifier, Standardised

Outputs = dict[str, NDArray[np.float32]]

_CHEAPEST = (Standardised(name="lda", center=0.0, scale=1.0),)
"""A distance that needs nothing but the logits."""


@dataclass(frozen=True)
class PooledModel:
    """Logits by the classifier of all tasks, distances by the detectors of each of them."""

    classifier: PooledClassifier
    detectors: tuple[PooledClassifier, ...]

    def outputs(self, encoded: NDArray[np.floating[Any]]) -> Outputs:
        """`logits` and `distances` [n, classes of all tasks] of vectors [n, dim], each row computed alone."""
        distances = [detector.outputs(encoded)["distances"] for detector in self.detectors]
        return {"logits": self.classifier.outputs(encoded)["logits"], "distances": np.concatenate(distances, axis=1)}


def without_distances(fitted: PooledClassifier) -> PooledClassifier:
    """The same logits, without what only the distances need."""
    return replace(fitted, settings=fitted.settings.model_copy(update={"unknown": _CHEAPEST}), forms={})


def detector_of(fitted: PooledClassifier, columns: slice) -> PooledClassifier:
    """The part of a classifier that computes the distances from some of its classes."""
    return replace(
        fitted,
        class_ids=fitted.class_ids[columns],
        lda_weights=fitted.lda_weights[columns],
        lda_bias=fitted.lda_bias[columns],
        ridge_weights=fitted.ridge_weights[columns],
    )
