"""From a curriculum to what a bundle stores: the classifier of all classes, and per lesson a task and extensions.

A lesson is learned as a task of a run is, from the statistics of everything before it. Examples of classes that are
known already are added to the statistics of their class first. They get a detector in addition to that of their task,
because the latter is frozen and would still call images unknown that are far from its examples. The new detector is
fitted to all further examples of a class, those of earlier lessons included, and replaces the earlier one. So there are
never more such detectors than extended classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from serving.bundle.decision import Rule, TaskRule
from serving.bundle.lessons import TaughtLesson, joined
from serving.bundle.own_scores import OwnScores
from serving.bundle.pooled import (
    ChoiceMemory,
    Detector,
    EarlierTask,
    PooledClassifier,
    PooledSettings,
    Statistics,
    learn_task,
)
from serving.bundle.pooled.left_out import FOLDS, LeftOut, LeftOutDiscriminant, LeftOutRidge, solution_with_all
from serving.bundle.pooled.solution import Solution
from serving.bundle.pooled.unknown_choice import left_out_distances, summed
from serving.bundle.pooled_model import Extension, PooledModel
from serving.teaching.curriculum import Curriculum, Examples, Task, Taught, Vectors, in_use

Progress = Callable[[float], None]

ENOUGH_SCORES = 8
"""Left-out examples from which the spread of their distances is estimated; of fewer, that of the task is used."""


@dataclass(frozen=True)
class Knowledge:
    """The result of learning a curriculum, ready to answer."""

    curriculum: Curriculum
    taught: tuple[Taught, ...]
    classifier: PooledClassifier
    statistics: Statistics
    settings: PooledSettings

    @property
    def tasks(self) -> tuple[Task, ...]:
        """All tasks, those of the run first."""
        return (*self.curriculum.tasks, *(each.task for each in self.taught if each.task is not None))

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(label for task in self.tasks for label in task.labels)

    @property
    def learned_curriculum(self) -> Curriculum:
        """The curriculum, of which no lesson has to be learned again."""
        return replace(self.curriculum, done=self.taught)

    def rule(self, like: Rule) -> Rule:
        """The decision rule, with the level of another one.

        In a bundle of an earlier version, the smallest surprise over tasks may decide. Lessons are many tasks of few
        images, of which the smallest would call everything known; so the expected one decides.
        """
        # Not a copy: that would keep what the other one has derived from its tasks.
        tasks = tuple(task.rule for task in self.tasks)
        return Rule(score=like.score, alpha=like.alpha, tasks=tasks, joint=like.joint, expectation=True)

    @property
    def extensions(self) -> dict[int, Extension]:
        """By the number of the lesson, those of which a class is still used."""
        used = in_use(self.taught)
        return {
            number: replace(each.extension, used=np.array([label in used[number] for label in each.extends]))
            for number, each in enumerate(self.taught)
            if used[number] and each.extension is not None
        }

    @property
    def model(self) -> PooledModel:
        place = {label: column for column, label in enumerate(self.labels)}
        extensions = (
            (np.array([place[label] for label in self.taught[number].extends]), extension)
            for number, extension in self.extensions.items()
        )
        adapters = tuple(task.adapter for task in self.curriculum.tasks if task.adapter is not None)
        detectors = tuple(task.detector for task in self.tasks)
        groups = tuple((np.array([place[label] for label in each.labels]), each) for each in self.curriculum.adapted)
        return PooledModel(self.classifier, detectors, adapters, self.curriculum.weight, tuple(extensions), groups)


def learn(curriculum: Curriculum, progress: Progress = lambda share: None) -> Knowledge:
    """Learn the lessons that are not done yet. The same curriculum gives the same result, to the bit.

    If all of them are done, nothing is computed but the sums.
    """
    lessons, done = curriculum.lessons, curriculum.done
    state = _State(
        curriculum.teachable.factors.statistics(),
        curriculum.teachable.memory,
        curriculum.teachable.settings,
        {label: task.rule for task in curriculum.tasks for label in task.labels},
        [task.frozen for task in curriculum.tasks],
        {},
    )
    for examples, taught in zip(lessons, done, strict=False):
        state.add(examples)
        state.note(examples, taught)
    found, fitted = list(done), None
    for number, examples in enumerate(lessons[len(done) :]):

        def of_lesson(share: float, number: int = number) -> None:
            progress((number + share) / (len(lessons) - len(done)))

        of_lesson(0.0)
        taught, fitted = _learn_lesson(state, examples, of_lesson)
        found.append(taught)
    if fitted is None:
        fitted = curriculum.classifier or PooledClassifier.fit(state.statistics, state.settings)
    return Knowledge(curriculum, tuple(found), fitted, state.statistics, state.settings)


@dataclass
class _State:
    """What the next lesson starts from."""

    statistics: Statistics
    memory: ChoiceMemory
    settings: PooledSettings
    rules: dict[str, TaskRule]
    """Values by label, in the order of the columns."""
    earlier: list[EarlierTask]
    """What stays of every task."""
    further: dict[str, list[Vectors]]
    """The examples of each label that were taught after it was known."""

    def columns(self, examples: Examples) -> dict[str, int]:
        """The column of each label, where new labels follow the known ones."""
        known = list(self.rules)
        new = [label for label in examples.images if label not in self.rules]
        place = {label: column for column, label in enumerate([*known, *new])}
        return {label: place[label] for label in examples.images}

    def add(self, examples: Examples) -> None:
        """Add examples to the statistics."""
        rows, ids = _rows(examples.vectors, self.columns(examples), self.statistics.projection.dim)
        self.statistics.add(rows, ids)

    def note(self, examples: Examples, taught: Taught) -> None:
        """The changes of the lesson, other than the statistics."""
        for label in taught.extends:
            self.further.setdefault(label, []).append(examples.vectors[label])
        self.memory, self.settings = taught.lesson.memory, taught.lesson.settings
        if taught.task is not None:
            self.earlier.append(taught.task.frozen)
            self.rules |= dict.fromkeys(taught.task.labels, taught.task.rule)


def _learn_lesson(state: _State, examples: Examples, progress: Progress) -> tuple[Taught, PooledClassifier]:
    """What a lesson becomes, and the classifier of all classes after it."""
    columns, dim = state.columns(examples), state.statistics.projection.dim
    known = {label: column for label, column in columns.items() if label in state.rules}
    new = {label: column for label, column in columns.items() if label not in state.rules}
    task: Task | None = None
    fitted: PooledClassifier | None = None
    if known:
        state.statistics.add(*_rows(examples.vectors, known, dim))
    if new:
        rows, ids = _rows(examples.vectors, new, dim)
        learned = learn_task(state.statistics, state.memory, rows, ids, examples.seed, state.earlier, progress)
        state.statistics, state.memory = learned.statistics, learned.memory
        fitted = learned.classifier
        state.settings = fitted.settings
        task = Task(tuple(new), learned.detector, learned.rule)
    extension: Extension | None = None
    if known:
        further = {label: np.concatenate([*state.further.get(label, ()), examples.vectors[label]]) for label in known}
        rest = _Extended.of(state, *_rows(further, known, dim), examples.seed)
        extension = rest.extension(state, known)
        fitted = fitted or PooledClassifier.of(rest.solution, state.settings)
    assert fitted is not None
    lesson = _lesson(examples, state.memory, state.settings)
    taught = Taught(lesson, task, tuple(known), extension)
    state.note(examples, taught)
    return taught, fitted


@dataclass(frozen=True)
class _Extended:
    """Further examples of known classes, which are in the statistics."""

    solution: Solution
    ids: NDArray[np.int64]
    distances: NDArray[np.float64]
    """The distance of each example from its own class, by statistics without the example's fold."""

    @classmethod
    def of(cls, state: _State, rows: Vectors, ids: NDArray[np.int64], seed: int) -> _Extended:
        fold = np.empty(len(ids), np.int64)
        fold[np.random.default_rng(seed).permutation(len(ids))] = np.arange(len(ids)) % FOLDS
        images = LeftOut(state.statistics, rows.astype(np.float64), ids, fold)
        settings = state.settings
        discriminant = LeftOutDiscriminant(images, settings.shrinkage)
        ridge = LeftOutRidge(images, settings.ridge, expanded=settings.expanded)
        found = np.empty(len(ids))
        for out in images.folds():
            # A known class has other images, so each keeps its column.
            distances = summed(left_out_distances(out, discriminant, ridge), settings.unknown)
            found[out] = distances[np.arange(len(out)), ids[out]]
        return cls(solution_with_all(settings, ridge), ids, found)

    def extension(self, state: _State, known: dict[str, int]) -> Extension:
        """The detectors of the examples, whose left-out distances get the median and the spread of the task's own."""
        scale, shift = [], []
        for label, column in known.items():
            own, rule = self.distances[self.ids == column], state.rules[label]
            spread = OwnScores.rank(own).tail if len(own) >= ENOUGH_SCORES else rule.tail
            scale.append(rule.tail / spread)
            shift.append(rule.center - rule.tail / spread * float(np.median(own)))
        detector = Detector.of(self.solution, state.settings.unknown, np.array(list(known.values())))
        return Extension(detector, np.array(scale), np.array(shift), np.ones(len(scale), bool))


def _rows(vectors: Mapping[str, Vectors], columns: dict[str, int], dim: int) -> tuple[Vectors, NDArray[np.int64]]:
    rows = [vectors[label] for label in columns]
    ids = np.repeat(np.array(list(columns.values()), np.int64), [len(each) for each in rows])
    return joined(rows, dim), ids


def _lesson(examples: Examples, memory: ChoiceMemory, settings: PooledSettings) -> TaughtLesson:
    labels = tuple(examples.images)
    return TaughtLesson(
        labels,
        np.repeat(np.arange(len(labels)), list(examples.images.values())),
        np.concatenate(list(examples.vectors.values())),
        tuple(name for label in labels for name in examples.digests[label]),
        memory,
        settings,
    )
