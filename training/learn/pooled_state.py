"""What a run with a trunk has learned: exact sums, the classifier after each task, and each task's own scores."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.bundle.decision import Rule, TaskRule
from serving.bundle.pooled import PooledClassifier, Statistics
from serving.bundle.pooled_model import detector_of, without_distances
from training.config import POOLED, RunConfig
from training.learn.pooled_decision import PooledDecider
from training.store.checkpoint import Checkpoint

Arrays = Mapping[str, NDArray[Any]]

STATISTICS, STAGE, DETECTOR, RULES = "statistics.", "stage{}.", "detector{}.", "rules"


@dataclass(frozen=True)
class PooledState:
    """The state after some tasks. Everything but the sums is as it was when its task was learned."""

    statistics: Statistics
    classifiers: tuple[PooledClassifier, ...] = ()
    """The classifier after each task: those of earlier tasks show how the run was at that time."""
    detectors: tuple[PooledClassifier, ...] = ()
    """What computes the distances from each task's classes, as it was when the task was learned."""
    rules: tuple[TaskRule, ...] = ()
    """Each task's scores of its own images, by its detector."""

    @property
    def tasks(self) -> int:
        return len(self.rules)

    def decider(self, alpha: float) -> PooledDecider:
        """The decision by the classifier after the last task."""
        rule = Rule(score=POOLED, alpha=alpha, tasks=self.rules, joint=True)
        return PooledDecider(rule, self.classifiers, self.detectors)

    def with_task(self, statistics: Statistics, fitted: PooledClassifier, rule: TaskRule) -> PooledState:
        """The state after another task, by the statistics and the classifier of all tasks and the new task's rule."""
        first = fitted.classes - rule.classes
        return PooledState(
            statistics,
            (*self.classifiers, without_distances(fitted)),
            (*self.detectors, detector_of(fitted, slice(first, fitted.classes))),
            (*self.rules, rule),
        )

    @classmethod
    def of(cls, checkpoint: Checkpoint, config: RunConfig) -> PooledState:
        """The state in a checkpoint; raises a RunError if it does not fit the configuration of the run."""
        classes = [len(labels) for labels in config.tasks]
        try:
            state = cls.from_arrays(checkpoint.pooled())
        except (KeyError, ValueError) as error:
            raise checkpoint.misfit(f"its statistics are not complete ({error})") from None
        found = [rule.classes for rule in state.rules]
        if len(found) != checkpoint.progress.task or found != classes[: len(found)]:
            raise checkpoint.misfit(f"statistics of tasks with {found} classes; config.json has {classes}")
        if config.trunk is None or state.statistics.projection.dim != config.trunk.dim:
            raise checkpoint.misfit(f"statistics of vectors of {state.statistics.projection.dim} numbers")
        return state

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Everything as arrays, for a checkpoint."""
        rules = json.dumps([rule.model_dump() for rule in self.rules]).encode()
        arrays = {RULES: np.frombuffer(rules, np.uint8)}
        arrays |= {STATISTICS + name: values for name, values in self.statistics.to_arrays().items()}
        for prefix, parts in ((STAGE, self.classifiers), (DETECTOR, self.detectors)):
            for task, part in enumerate(parts):
                arrays |= {prefix.format(task) + name: values for name, values in part.to_arrays().items()}
        return arrays

    @classmethod
    def from_arrays(cls, arrays: Arrays) -> PooledState:
        """The state of `to_arrays`; raises a KeyError or a ValueError if it is not complete."""
        rules = tuple(TaskRule.model_validate(each) for each in json.loads(arrays[RULES].tobytes()))
        classifiers, detectors = (
            tuple(PooledClassifier.from_arrays(_below(arrays, prefix.format(task))) for task in range(len(rules)))
            for prefix in (STAGE, DETECTOR)
        )
        return cls(Statistics.from_arrays(_below(arrays, STATISTICS)), classifiers, detectors, rules)


def _below(arrays: Arrays, prefix: str) -> dict[str, NDArray[Any]]:
    return {name.removeprefix(prefix): values for name, values in arrays.items() if name.startswith(prefix)}
