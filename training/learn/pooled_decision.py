"""The decision of a run with pooled statistics: one classifier over the classes of all tasks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.parameter_counts import ParameterCounts
from serving.bundle.decision import Rule
from serving.bundle.lessons import Teachable
from serving.bundle.pooled import Detector, PooledClassifier
from serving.bundle.pooled.adapters import Adapter
from serving.bundle.pooled_model import PooledModel
from training.config import POOLED, POOLED_AND_LOGITS


@dataclass(frozen=True)
class PooledDecider:
    """The classifier of all tasks and the ones before it, and every task's detector."""

    rule: Rule
    classifiers: tuple[PooledClassifier, ...]
    """The classifier after each task; the last one is served."""
    detectors: tuple[Detector, ...]
    """The detector of every task, as it was when the task was learned."""
    images: int = 0
    """How many images the statistics are of."""
    median_images: int = 0
    """How many of them half of the classes have at most."""
    teachable: Teachable | None = None
    """What a server needs to learn further classes, if the run has kept it."""
    adapters: tuple[Adapter, ...] = ()
    """Every task's adapter, if they take part."""
    weight: float = 0.0
    """The weight of the adapters against the statistics."""

    @property
    def name(self) -> str:
        return self.rule.score

    def with_adapters(self, adapters: tuple[Adapter, ...], weight: float) -> PooledDecider:
        """The decision with adapters."""
        rule = self.rule.model_copy(update={"score": POOLED_AND_LOGITS})
        return replace(self, rule=rule, adapters=adapters, weight=weight)

    def without_adapters(self) -> PooledDecider:
        """The decision by statistics alone."""
        rule = self.rule.model_copy(update={"score": POOLED})
        return replace(self, rule=rule, adapters=(), weight=0.0)

    def after(self, tasks: int) -> PooledModel:
        """The model after the first tasks were learned."""
        return PooledModel(self.classifiers[tasks - 1], self.detectors[:tasks], self.adapters[:tasks], self.weight)

    @property
    def model(self) -> PooledModel:
        return self.after(len(self.detectors))

    def outputs(self, encoded: Any) -> dict[str, NDArray[Any]]:
        """The inputs of the decision rule [n, classes of all tasks], from vectors [n, dim] or [n, rotations, dim]."""
        return self.outputs_after(len(self.detectors), encoded)

    def outputs_after(self, tasks: int, encoded: Any) -> dict[str, NDArray[Any]]:
        """The outputs after the first tasks were learned; only their classes have columns."""
        return dict(self.after(tasks).outputs(np.asarray(encoded)))

    def parameters(self) -> ParameterCounts:
        """The classifier is shared, apart from the numbers of each class; those and its adapter count for a task."""
        counts = _numbers(self.model.classifier)
        classes = [_numbers_per_class(self.model.classifier) * task.classes for task in self.rule.tasks]
        adapters = [adapter.numbers for adapter in self.adapters] or [0] * len(classes)
        own = [of_classes + of_adapter for of_classes, of_adapter in zip(classes, adapters, strict=True)]
        return ParameterCounts(
            inference=counts + sum(adapters),
            shared=counts - sum(classes),
            per_task=own,
            detectors_per_task=[_numbers(detector) for detector in self.detectors],
        )


def _numbers(part: PooledClassifier | Detector) -> int:
    return sum(each.size for name, each in part.to_arrays().items() if name != "settings")


def _numbers_per_class(classifier: PooledClassifier) -> int:
    return sum(each[0].size for each in (classifier.class_ids, classifier.bias, classifier.weights))
