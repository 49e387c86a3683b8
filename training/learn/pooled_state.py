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
from training.config import POOLED, RunConfig
from training.learn.pooled_decision import PooledDecider
from training.store.checkpoint import Checkpoint

Arrays = Mapping[str, NDArray[Any]]

STATISTICS, STAGE, RULES = "statistics.", "stage{}.", "rules"


@dataclass(frozen=True)
class PooledState:
    """The state after some tasks. Everything but the sums is as it was when its task was learned."""

    statistics: Statistics
    classifiers: tuple[PooledClassifier, ...] = ()
    """The classifier after each task: those of earlier tasks show how the run was at that time."""
    rules: tuple[TaskRule, ...] = ()

    @property
    def tasks(self) -> int:
        return len(self.rules)

    def decider(self, alpha: float) -> PooledDecider:
        """The decision by the classifier after the last task."""
        return PooledDecider(Rule(score=POOLED, alpha=alpha, tasks=self.rules, joint=True), self.classifiers)

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
        for stage, classifier in enumerate(self.classifiers):
            arrays |= {STAGE.format(stage) + name: values for name, values in classifier.to_arrays().items()}
        return arrays

    @classmethod
    def from_arrays(cls, arrays: Arrays) -> PooledState:
        """The state of `to_arrays`; raises a KeyError or a ValueError if it is not complete."""
        rules = tuple(TaskRule.model_validate(each) for each in json.loads(arrays[RULES].tobytes()))
        classifiers = [PooledClassifier.from_arrays(_below(arrays, STAGE.format(stage))) for stage in range(len(rules))]
        return cls(Statistics.from_arrays(_below(arrays, STATISTICS)), tuple(classifiers), rules)


def _below(arrays: Arrays, prefix: str) -> dict[str, NDArray[Any]]:
    return {name.removeprefix(prefix): values for name, values in arrays.items() if name.startswith(prefix)}
