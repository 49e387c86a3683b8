"""Teach pooled statistics one task: the classifier of all tasks, its temperature, and the task's own scores."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from serving.bundle.decision import TaskRule
from serving.bundle.pooled import PooledClassifier, PooledSettings, Projection, Standardised, Statistics
from serving.bundle.pooled.solution import discriminant

FOLDS = 5
SOLVES = FOLDS + 2
"""How many systems of equations of the size of the statistics are solved per task."""
SHRINKAGE = 0.35
TEMPERATURES = np.geomspace(0.05, 50, 61)

Array = NDArray[np.floating[Any]]
Ids = NDArray[np.integer[Any]]


class FittedTask(NamedTuple):
    """The statistics with the new task, the classifier of all tasks, and the rule of the new task."""

    statistics: Statistics
    classifier: PooledClassifier
    rule: TaskRule


def projection_for(dim: int) -> Projection:
    """The expansion of encoded vectors of a trunk: none, as linear discriminant analysis needs none."""
    return Projection(dim, 0)


def fit_task(before: Statistics, encoded: Array, class_ids: Ids, seed: int) -> FittedTask:
    """Add the vectors [n, dim] of a task's classes [n]."""
    statistics = before.copy()
    statistics.add(encoded, class_ids)
    outputs = left_out_outputs(statistics, encoded, class_ids, seed)
    columns = np.searchsorted(statistics.class_ids, class_ids)
    scores = -outputs[:, np.unique(columns)].max(axis=1)
    settings = PooledSettings(
        shrinkage=SHRINKAGE,
        ridge=0.01,
        mix=0.0,
        lda_scale=1.0,
        ridge_scale=1.0,
        temperature=calibrated(outputs, columns),
        unknown=(Standardised(name="lda", center=0.0, scale=1.0),),
        rank=0,
    )
    rule = TaskRule.fit(scores, len(np.unique(class_ids)))
    return FittedTask(statistics, PooledClassifier.fit(statistics, settings), rule)


def left_out_outputs(statistics: Statistics, encoded: Array, class_ids: Ids, seed: int) -> Array:
    """The outputs [n, classes] for the images of a task by statistics without the fold of the image.

    An image that is alone in its class stays in the statistics.
    """
    generator, fold = np.random.default_rng(seed), np.empty(len(class_ids), int)
    for class_id in np.unique(class_ids):
        own = np.flatnonzero(class_ids == class_id)
        fold[own] = generator.permutation(len(own)) % FOLDS if len(own) > 1 else FOLDS
    outputs = np.empty((len(class_ids), len(statistics.class_ids)))
    for number in np.unique(fold):
        out = fold == number
        rest = statistics.copy()
        if number < FOLDS:
            rest.remove(encoded[out], class_ids[out])
        outputs[out] = discriminant(rest, SHRINKAGE).outputs(encoded[out])
    return outputs


def calibrated(outputs: Array, columns: Ids) -> float:
    """The temperature by which softmax of outputs [n, classes] has the smallest cross-entropy."""
    return float(min(TEMPERATURES, key=lambda temperature: cross_entropy(outputs / temperature, columns)))


def cross_entropy(logits: Array, columns: Ids) -> float:
    """The mean of -log softmax of the true classes [n]."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    return float(np.mean(np.log(np.exp(shifted).sum(axis=1)) - shifted[np.arange(len(columns)), columns]))
