"""What a run with a trunk has learned: exact sums, the classifier after each task, and each task's own scores."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.bundle.decision import Rule, TaskRule
from serving.bundle.lessons import Teachable
from serving.bundle.pooled import ChoiceMemory, Detector, EarlierTask, LearnedTask, PooledClassifier, Statistics
from serving.bundle.pooled.factors import ClassFactors
from training.config import POOLED, RunConfig
from training.learn.pooled_decision import PooledDecider
from training.store.checkpoint import Checkpoint

Arrays = Mapping[str, NDArray[Any]]

STATISTICS, MEMORY, FACTORS = "statistics.", "memory.", "factors."
STAGE, DETECTOR, RULES = "stage{}.", "detector{}.", "rules"


@dataclass(frozen=True)
class PooledState:
    """The state after some tasks. Everything but the sums is as it was when its task was learned."""

    statistics: Statistics
    memory: ChoiceMemory = field(default_factory=ChoiceMemory)
    classifiers: tuple[PooledClassifier, ...] = ()
    """The classifier after each task: those of earlier tasks show how the run was at that time."""
    detectors: tuple[Detector, ...] = ()
    """What computes the distances from each task's classes, as it was when the task was learned."""
    rules: tuple[TaskRule, ...] = ()
    """Each task's scores of its own images, by its detector."""
    factors: ClassFactors | None = None
    """What each class adds to the sums; None in a run that was begun before they were kept."""

    @property
    def tasks(self) -> int:
        return len(self.rules)

    @property
    def earlier(self) -> list[EarlierTask]:
        """The parts of every task that never change after it was learned."""
        return [EarlierTask(*pair) for pair in zip(self.detectors, self.rules, strict=True)]

    def decider(self, alpha: float) -> PooledDecider:
        """The decision by the classifier after the last task."""
        rule = Rule(score=POOLED, alpha=alpha, tasks=self.rules, joint=True, expectation=True)
        teachable = None
        if self.factors is not None and self.classifiers:
            teachable = Teachable(self.factors, self.memory, self.classifiers[-1].settings)
        counts = self.statistics.counts
        return PooledDecider(
            rule=rule,
            classifiers=self.classifiers,
            detectors=self.detectors,
            images=self.statistics.images,
            median_images=int(np.median(counts)) if len(counts) else 0,
            teachable=teachable,
        )

    def with_task(self, learned: LearnedTask, factors: ClassFactors | None = None) -> PooledState:
        """The state after another task; `factors` are those of all classes so far."""
        return PooledState(
            learned.statistics,
            learned.memory,
            (*self.classifiers, learned.classifier),
            (*self.detectors, learned.detector),
            (*self.rules, learned.rule),
            factors,
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
        arrays |= {MEMORY + name: values for name, values in self.memory.to_arrays().items()}
        if self.factors is not None:
            arrays |= {FACTORS + name: values for name, values in self.factors.to_arrays().items()}
        for task, (classifier, detector) in enumerate(zip(self.classifiers, self.detectors, strict=True)):
            arrays |= {STAGE.format(task) + name: values for name, values in classifier.to_arrays().items()}
            arrays |= {DETECTOR.format(task) + name: values for name, values in detector.to_arrays().items()}
        return arrays

    @classmethod
    def from_arrays(cls, arrays: Arrays) -> PooledState:
        """The state of `to_arrays`; raises a KeyError or a ValueError if it is not complete."""
        rules = tuple(TaskRule.model_validate(each) for each in json.loads(arrays[RULES].tobytes()))
        tasks = range(len(rules))
        classifiers = tuple(PooledClassifier.from_arrays(_below(arrays, STAGE.format(task))) for task in tasks)
        detectors = tuple(Detector.from_arrays(_below(arrays, DETECTOR.format(task))) for task in tasks)
        statistics = Statistics.from_arrays(_below(arrays, STATISTICS))
        memory = ChoiceMemory.from_arrays(_below(arrays, MEMORY))
        found = _below(arrays, FACTORS)
        factors = ClassFactors.from_arrays(found) if found else None
        return cls(statistics, memory, classifiers, detectors, rules, factors)


def _below(arrays: Arrays, prefix: str) -> dict[str, NDArray[Any]]:
    return {name.removeprefix(prefix): values for name, values in arrays.items() if name.startswith(prefix)}
