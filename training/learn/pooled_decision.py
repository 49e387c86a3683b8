"""The decision of a run with pooled statistics: one classifier over the classes of all tasks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.parameter_counts import ParameterCounts
from serving.bundle.decision import Rule
from serving.bundle.pooled import PooledClassifier
from training.config import POOLED


@dataclass(frozen=True)
class PooledDecider:
    """The classifier of all tasks, and the ones before it."""

    rule: Rule
    classifiers: tuple[PooledClassifier, ...]
    """The classifier after each task; the last one is served."""
    name: str = POOLED

    @property
    def classifier(self) -> PooledClassifier:
        return self.classifiers[-1]

    def outputs(self, encoded: Any) -> dict[str, NDArray[Any]]:
        """The inputs of the decision rule [n, classes of all tasks], from vectors [n, dim]."""
        return dict(self.classifier.outputs(np.asarray(encoded)))

    def outputs_after(self, tasks: int, encoded: Any) -> dict[str, NDArray[Any]]:
        """The same when so many tasks were learned; only their classes have columns."""
        return dict(self.classifiers[tasks - 1].outputs(np.asarray(encoded)))

    def parameters(self) -> ParameterCounts:
        """Numbers that a class needs for itself count for its task; all others are shared."""
        classes = self.classifier.classes
        arrays = self.classifier.to_arrays()
        own = sum(each.size for each in arrays.values() if each.ndim and len(each) == classes) // classes
        total = sum(each.size for name, each in arrays.items() if name != "settings")
        per_task = [own * task.classes for task in self.rule.tasks]
        return ParameterCounts(
            inference=total, shared=total - sum(per_task), per_task=per_task, detectors_per_task=[0] * len(per_task)
        )
