"""Learn one task from its encoded vectors, in closed form and with numpy alone: training and servers both call this.

1. The vectors are added to the statistics.
2. Every candidate of the classifier is judged by the task's images, a few of which are left out at a time.
3. Groups of the task's classes are left out in turn, and the unknown score is chosen that separates them best.
4. The task's own scores, on which the acceptance of known images rests, are those of its left-out images.

What was measured is added to the memory of the run, and the sums over all tasks choose. The classifier and its settings
change with every task; the detector of a task and its own scores stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from serving.bundle.decision import TaskRule, expected_surprises
from serving.bundle.pooled.classifier import PooledClassifier
from serving.bundle.pooled.classifier_choice import RIDGES, SHRINKAGES, chosen_classifier, cross_entropies
from serving.bundle.pooled.detector import Detector
from serving.bundle.pooled.left_out import LeftOut, LeftOutDiscriminant, LeftOutRidge, solution_with_all
from serving.bundle.pooled.memory import ChoiceMemory
from serving.bundle.pooled.projection import Projection
from serving.bundle.pooled.settings import PooledSettings, Standardised
from serving.bundle.pooled.solution import Solution
from serving.bundle.pooled.statistics import Statistics
from serving.bundle.pooled.unknown_choice import (
    ALONE,
    chosen_unknown,
    left_out_distances,
    separations,
    standardised,
    summed,
)

SOLVES = len(SHRINKAGES) + len(RIDGES) + 1
"""How many systems of equations of the size of the statistics are solved per task."""
ROWS, MANY_ROWS = 16, 64
"""Signed sums per group of numbers: with few photos, |P x| has a quarter as many numbers as x; with many, as many."""
MANY_PHOTOS = 100
"""Photos per class from which the wider expansion pays: with fewer it takes time and gains nothing."""

Array = NDArray[np.floating[Any]]
Ids = NDArray[np.integer[Any]]


class EarlierTask(NamedTuple):
    """The parts of a task that never change after it was learned."""

    detector: Detector
    rule: TaskRule

    def surprise(self, encoded: Array) -> Array:
        """[n] of vectors [n, dim]."""
        return self.rule.surprise(self.detector.distances(encoded).min(axis=1).astype(np.float64))


class LearnedTask(NamedTuple):
    """The result of learning one more task."""

    statistics: Statistics
    """Sums over the images of all tasks."""
    memory: ChoiceMemory
    """The measurements by which the next task chooses settings again."""
    classifier: PooledClassifier
    """The classifier of all tasks; its last columns are the new task's."""
    detector: Detector
    """The detector of the new task's classes, which never changes later."""
    rule: TaskRule
    """The new task's own scores, by the detector."""

    @property
    def task(self) -> EarlierTask:
        return EarlierTask(self.detector, self.rule)


class ScoredImages(NamedTuple):
    """Left-out images of a task, scored by solutions without them."""

    scores: Array  # [n], the distance from the nearest class of the task
    fold: NDArray[np.int64]  # [n]
    encoded: Array  # [n, dim]
    logits: Array  # [n, classes of all tasks]
    summands: tuple[Standardised, ...]


def projection_for(dim: int, photos_per_class: float = 0.0) -> Projection:
    """The expansion of encoded vectors of a trunk.

    It is fixed by the photos of the first task, because the sums of another one cannot be made from its sums.
    """
    return Projection(dim, MANY_ROWS if photos_per_class >= MANY_PHOTOS else ROWS)


def learn_task(
    statistics: Statistics,
    memory: ChoiceMemory,
    encoded: Array,
    class_ids: Ids,
    seed: int,
    earlier: Sequence[EarlierTask] = (),
    progress: Callable[[float], None] = lambda share: None,
) -> LearnedTask:
    """Add a task with vectors [n, dim] of the classes [n], whose ids are above those of all earlier tasks.

    `statistics` and `memory` are those after the task before (`Statistics(projection_for(dim))` and `Memory()` at
    first), and are left as they are; `earlier` are all tasks before. The same arguments give the same result.
    `progress` is called with the share that is done.
    """
    after, classes = statistics.copy(), np.unique(class_ids)
    after.add(encoded, class_ids)
    images = LeftOut.of(after, encoded, class_ids, seed)
    judged = (
        JudgedSettings.of(images, memory, progress)
        if len(images)
        else JudgedSettings(memory, chosen_classifier(memory.cross_entropies))
    )
    if judged.ridge is None:
        solution = Solution.of(after, judged.settings)
    else:
        solution = solution_with_all(judged.settings, judged.ridge)
    if len(images):
        own = judged.own_scores(images, len(classes))
    else:
        own = self_judged(solution, judged.settings, encoded, classes)
    settings = judged.settings.model_copy(update={"unknown": own.summands})
    surprises = task_surprises(own, earlier)
    expected = expected_surprises(surprises, task_probabilities(own.logits, earlier, len(classes)))
    return LearnedTask(
        after,
        judged.memory,
        PooledClassifier.of(solution, settings),
        Detector.of(solution, own.summands, classes),
        TaskRule.fit(own.scores, len(classes), surprises.min(axis=1), expected),
    )


@dataclass(frozen=True)
class JudgedSettings:
    """The settings that are chosen by all tasks so far, and what they rest on."""

    memory: ChoiceMemory
    settings: PooledSettings
    discriminant: LeftOutDiscriminant | None = None
    ridge: LeftOutRidge | None = None

    @classmethod
    def of(
        cls, images: LeftOut, memory: ChoiceMemory, progress: Callable[[float], None] = lambda share: None
    ) -> JudgedSettings:
        """Judge every candidate by the images of a task."""
        discriminants = {}
        for number, each in enumerate(SHRINKAGES):
            progress(number / SOLVES)
            discriminants[each] = LeftOutDiscriminant(images, each)
        ridges = {}
        for number, choice in enumerate(RIDGES, len(SHRINKAGES)):
            progress(number / SOLVES)
            ridges[choice] = LeftOutRidge(images, choice[1], expanded=choice[0])
        progress((SOLVES - 1) / SOLVES)
        nats = memory.cross_entropies + cross_entropies(images, discriminants, ridges)
        settings = chosen_classifier(nats)
        discriminant, ridge = discriminants[settings.shrinkage], ridges[settings.expanded, settings.ridge]
        aurocs = memory.separations + separations(images, discriminant, ridge)
        return cls(replace(memory, cross_entropies=nats, separations=aurocs), settings, discriminant, ridge)

    def own_scores(self, images: LeftOut, classes: int) -> ScoredImages:
        """The images of a task with this number of classes, left out fold by fold."""
        assert self.discriminant is not None
        assert self.ridge is not None
        names, folds = chosen_unknown(self.memory.separations), list(images.folds())
        parts = [left_out_distances(rows, self.discriminant, self.ridge) for rows in folds]
        whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        mix, temperature = self.settings.mix, self.settings.temperature
        logits = -(1 - mix) * whole["lda"] / self.discriminant.margin - mix * whole["ridge"] / self.ridge.margin
        distances = {name: whole[name][:, -classes:] for name in names}
        summands = tuple(standardised(name, distances[name]) for name in names)
        order = np.concatenate(folds)
        scores = summed(distances, summands).min(axis=1)
        return ScoredImages(scores, images.fold[order], images.encoded[order], logits / temperature, summands)


def self_judged(solution: Solution, settings: PooledSettings, encoded: Array, classes: Ids) -> ScoredImages:
    """If no image can be left out, because every class has a single one, the images judge themselves."""
    distances = {name: solution.distances(name, encoded)[:, -len(classes) :] for name in ALONE}
    summands = tuple(standardised(name, distances[name]) for name in ALONE)
    scores, logits = summed(distances, summands).min(axis=1), PooledClassifier.of(solution, settings).logits(encoded)
    return ScoredImages(scores, np.zeros(len(encoded), np.int64), encoded, logits.astype(np.float64), summands)


def task_probabilities(logits: Array, earlier: Sequence[EarlierTask], classes: int) -> Array:
    """p(t) [n, tasks] by logits [n, classes of all tasks]; the last `classes` are the new task's."""
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    counts = [*(len(task.detector.class_ids) for task in earlier), classes]
    starts = np.cumsum([0, *counts[:-1]])
    # Classes whose task is not in `earlier` are left out.
    sums = np.add.reduceat(exponentials[:, -sum(counts) :], starts, axis=1)
    probabilities: Array = sums / sums.sum(axis=1, keepdims=True)
    return probabilities


def task_surprises(own: ScoredImages, earlier: Sequence[EarlierTask]) -> Array:
    """The surprise of each left-out image by all earlier tasks and by its own one, [n, tasks].

    By its own task, an image is ranked among the scores of the other folds, as a new image would be.
    """
    surprises = np.full(len(own.scores), np.inf)
    for number in np.unique(own.fold):
        mine = own.fold == number
        others = own.scores[~mine] if (~mine).any() else own.scores
        surprises[mine] = TaskRule.fit(others, 1).surprise(own.scores[mine])
    return np.stack([*(task.surprise(own.encoded) for task in earlier), surprises], axis=1)
