"""The decision of a run with pooled statistics: one classifier over the classes of all tasks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.parameter_counts import ParameterCounts
from serving.bundle.decision import Rule
from serving.bundle.pooled import PooledClassifier
from serving.bundle.pooled_model import PooledModel
from training.config import POOLED


@dataclass(frozen=True)
class PooledDecider:
    """The classifier of all tasks and the ones before it, and every task's detector."""

    rule: Rule
    classifiers: tuple[PooledClassifier, ...]
    """The classifier after each task; the last one is served."""
    detectors: tuple[PooledClassifier, ...]
    """Every task's part of the classifier that was fitted when the task was learned."""
    name: str = POOLED

    def after(self, tasks: int) -> PooledModel:
        """The model when so many tasks were learned."""
        return PooledModel(self.classifiers[tasks - 1], self.detectors[:tasks])

    @property
    def model(self) -> PooledModel:
        return self.after(len(self.detectors))

    def outputs(self, encoded: Any) -> dict[str, NDArray[Any]]:
        """The inputs of the decision rule [n, classes of all tasks], from vectors [n, dim]."""
        return self.outputs_after(len(self.detectors), encoded)

    def outputs_after(self, tasks: int, encoded: Any) -> dict[str, NDArray[Any]]:
        """The same when so many tasks were learned; only their classes have columns."""
        return dict(self.after(tasks).outputs(np.asarray(encoded)))

    def parameters(self) -> ParameterCounts:
        """The classifier is shared, apart from the numbers of each class; those count for its task."""
        counts = _numbers(self.model.classifier)
        own = [_numbers_per_class(self.model.classifier) * task.classes for task in self.rule.tasks]
        return ParameterCounts(
            inference=counts,
            shared=counts - sum(own),
            per_task=own,
            detectors_per_task=[_numbers(detector) for detector in self.detectors],
        )


def _numbers(classifier: PooledClassifier) -> int:
    return sum(each.size for name, each in classifier.to_arrays().items() if name != "settings")


def _numbers_per_class(classifier: PooledClassifier) -> int:
    rows = (classifier.class_ids, classifier.lda_bias, classifier.lda_weights, classifier.ridge_weights)
    return sum(each[0].size for each in rows)
