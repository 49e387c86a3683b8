"""Interim: folds for settings and own scores."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from serving.bundle.decision import TaskRule
from serving.bundle.pooled import PooledClassifier, PooledSettings, Projection, Standardised, Statistics

FOLDS = 2


class FittedTask(NamedTuple):
    statistics: Statistics
    classifier: PooledClassifier
    rules: tuple[TaskRule, ...]


def new_statistics(dim: int) -> Statistics:
    return Statistics(Projection(dim, 0))


def fit_task(
    before: Statistics,
    rules: tuple[TaskRule, ...],
    encoded: NDArray[np.float32],
    class_ids: NDArray[np.integer[Any]],
    seed: int,
) -> FittedTask:
    statistics = before.copy()
    statistics.add(encoded, class_ids)
    generator = np.random.default_rng(seed)
    fold = np.empty(len(class_ids), int)
    for class_id in np.unique(class_ids):
        own = np.flatnonzero(class_ids == class_id)
        fold[own] = generator.permutation(len(own)) % FOLDS
    settings = PooledSettings(mix=0.0, unknown=(Standardised(name="mahalanobis"),))
    scores = np.empty(len(class_ids))
    lda = np.empty((len(class_ids), len(statistics.class_ids)))
    columns = np.unique(class_ids)
    for number in range(FOLDS):
        out = fold == number
        if not out.any():
            continue
        rest = statistics.copy()
        rest.remove(encoded[out], class_ids[out])
        outputs = PooledClassifier.fit(rest, settings).outputs(encoded[out])
        places = np.searchsorted(rest.class_ids, columns)
        scores[out] = outputs["distances"][:, places].min(axis=1)
        lda[out] = outputs["logits"]
    temperatures = np.logspace(-1, 2, 61)
    target = np.searchsorted(statistics.class_ids, class_ids)

    def nats(temperature: float) -> float:
        logits = lda / temperature
        logits -= logits.max(axis=1, keepdims=True)
        return float((np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(target)), target]).mean())

    settings = settings.model_copy(update={"temperature": float(min(temperatures, key=nats))})
    rule = TaskRule.fit(scores, len(columns))
    return FittedTask(statistics, PooledClassifier.fit(statistics, settings), (*rules, rule))


SOLVES = 8
"""About how many times the work of solving for the classifier once a task takes."""


def projection_for(dim: int) -> Projection:
    return Projection(dim, 0)
