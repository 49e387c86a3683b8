"""The decision rule: from the network's outputs to a class, a task, or "unknown".

Evaluation, the command line and the server all use this module, so the measured accuracy is the served accuracy.
Every row is decided alone: an answer never depends on the other images in its batch.

The network outputs one distance per class (`distances`: higher is more unknown). The score s_k(x) of a task is the
distance of its nearest class, and exp(-s_k) a likelihood ratio of "from this task" against "not from this task", up to
a factor. A task stores the scores of its own images, by detectors that were not fitted to them. Two quantities follow,
and both can be compared between tasks although no two tasks ever saw the same image:

- which task: P(x in task k) = P'_k(x) / sum_j P'_j(x) (Theorem 2) with P'_k = exp(-s_k), so that
  P(x in class c) = P(c | its task) * P(x in its task). If one classifier has the classes of all tasks (`Rule.joint`),
  one softmax over its logits is P(x in class c), and its sum over the classes of a task is P(x in task k);
- known or not: the rank of s_k among those N_k scores is a conformal p-value. An image is known if for some task it is
  at least alpha. With a single task whose scores are of validation images, this accepts at least 1 - alpha of its own
  images on average. If scores of left-out training images are among them, the share is measured to be close to
  1 - alpha, and not proven: the network has seen these images, though the detectors have not.
  If its classes have very different numbers of images, they count equally (`OwnScores.rank`): the p-value is the mean
  of those among each class, and the promise is for the mean over the classes of the shares accepted. Proof: take one
  further image of each class. Ranked with weights 1 / (n_c + 1), at most a share alpha of these images, averaged over
  the classes, is below alpha, and the p-value is at least that rank.
  With several tasks, an unknown image has a chance with each of them, and its largest p-value tends to rise with every
  task. There are two cures:
  - Tasks that share one space of encoded vectors measure it on known images (`TaskRule.overall`): each task's left-out
    images are scored by all tasks so far, and the expected surprise of an image (`expected_surprises`) is ranked among
    those of all tasks; in bundles of earlier versions, the smallest surprise.
  - Tasks with features of their own cannot score each other's images. The task with the heaviest tail among its few
    scores would decide, so the scores of all tasks, each less its task's median and divided by its mean excess, count
    as OTHERS further scores of every task. Then the promise holds as far as these tails are alike, which is measured
    for every task after every task; with N_k far above OTHERS, it holds for task k whatever the other tasks are.
  A task with fewer than 1 / alpha scores of its own rejects no image. Its unknown scores stay within the threshold, so
  that an image is known exactly if its unknown score is within it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from serving.bundle.own_scores import MixedRanks, OwnScores, Ranks, threshold

Array = NDArray[np.floating[Any]]
Outputs = Mapping[str, NDArray[Any]]
Starts = NDArray[np.integer[Any]]

NETWORK_NAMES = ("logits", "distances")
"""The outputs of a network for a batch: each [batch, classes], the classes of a task next to each other.

Distances of a task's own images have their median at 0.
"""

OUTPUT_NAMES = (*NETWORK_NAMES, "scores", "p_task", "p_within_task", "probability")
"""The outputs of the graph: `scores` and `p_task` are [batch, tasks], the others [batch, classes]."""

FEATURES = "features"
"""An optional output of the graph: every task's standardised features of the image, [batch, features of all tasks]."""


_WHOLE_ROW = np.array([0])


ENOUGH = 100
"""The number of images that the expected surprise is ranked among, if there are enough."""
DOUBT = 1.0
"""The weight of not knowing which task an image belongs to, in -log10 of a p-value per nat of entropy."""


class TaskRule(OwnScores):
    """The statistics of one task that the decision needs: the scores of its own images."""

    classes: int = Field(gt=0, description="number of output columns of this task")
    overall: tuple[float, ...] = Field(
        default=(), description="smallest surprise of each own image over all tasks by then, if tasks are compared so"
    )
    expected: tuple[float, ...] = Field(
        default=(), description="expected surprise of each own image over all tasks by then, if tasks are compared so"
    )

    @classmethod
    def fit(
        cls,
        scores: Sequence[float] | Array,
        classes: int,
        overall: Sequence[float] | Array = (),
        expected: Sequence[float] | Array = (),
        local_classes: NDArray[np.integer] | None = None,
    ) -> TaskRule:
        """The rule of a task from the scores of its own images; with the class of each, `local_classes` [n], classes
        count equally."""
        measured = {"overall": tuple(map(float, overall)), "expected": tuple(map(float, expected))}
        return cls.rank(scores, local_classes, classes=classes, **measured)


def expected_surprises(surprises: Array, p_task: Array) -> Array:
    """sum_t p(t) (surprise_t - DOUBT log p(t)) [n] of surprises and probabilities of tasks [n, tasks].

    The surprise of the task that an image belongs to, as far as the classifier of all tasks knows it, plus the doubt
    about that. An image of a known task keeps its value when further tasks are learned, however many, unless these are
    confused with its task. The smallest surprise over all tasks does not: with every task, and above all with tasks of
    few images, more images have a small one somewhere.
    """
    doubt = -(p_task * np.log(np.maximum(p_task, np.finfo(np.float64).tiny))).sum(axis=1)
    value: Array = (p_task * surprises).sum(axis=1) + DOUBT * doubt
    return value


class Rule(BaseModel):
    """The decision rule of a whole network: the score, the level alpha and the statistics of every task."""

    model_config = ConfigDict(frozen=True)

    score: str = Field("features", description="the name of the unknown score that the distances come from")
    alpha: float = Field(0.05, gt=0, lt=1, description="share of known images that may be called unknown")
    tasks: tuple[TaskRule, ...] = Field(min_length=1)
    joint: bool = Field(
        default=False, description="whether one softmax over the logits of all tasks gives the probabilities"
    )
    expectation: bool = Field(
        default=False,
        description="whether the expected surprise over the tasks decides if all have stored it; else the smallest one",
    )

    def of(self, tasks: Sequence[int]) -> Rule:
        """The rule of a network with some of the tasks only."""
        # Not a copy: that would keep what was computed of all tasks.
        kept = {name: getattr(self, name) for name in type(self).model_fields}
        return Rule(**kept | {"tasks": tuple(self.tasks[task] for task in tasks)})

    def surprise(self, scores: Array) -> Array:
        """-log10 of the p-values of scores [batch, tasks], continuous and strictly rising.

        Beyond the last stored score it rises linearly, as if the scores' tail were exponential. That ranks unknown
        images, and decides nothing: the p-value that decides is at least that of `least_p_values`.
        """
        return self._ranks.surprise(scores)

    @cached_property
    def by_expectation(self) -> bool:
        """Whether the expected surprise over the tasks decides; else it is the smallest one."""
        return self.joint and self.expectation and all(task.expected for task in self.tasks)

    @cached_property
    def overall(self) -> OwnScores | None:
        """What the expected or the smallest surprise over the tasks is ranked among; None: it decides itself."""
        if self.by_expectation:
            return OwnScores.rank(np.concatenate([task.expected for task in self._representative()]))
        known = [task.overall for task in self.tasks]
        return OwnScores.rank(np.concatenate(known)) if all(known) else None

    def _representative(self) -> list[TaskRule]:
        """The tasks whose images were compared with enough others when they were learned.

        An image can be mistaken for one of another task, which raises its expected surprise. When the first tasks were
        learned, there were few other tasks, so a threshold by their images would reject more known images than alpha.
        A task counts if it came after at least half as many classes as the last task. Earlier tasks count only if there
        are not enough images otherwise.
        """
        found, images = list[TaskRule](), 0
        for task, before in reversed(list(zip(self.tasks, self.starts, strict=True))):
            if 2 * before >= self.starts[-1] or images < ENOUGH:
                found.append(task)
                images += len(task.expected)
        return found

    def least_p_values(self, alpha: float) -> Array:
        """The smallest p-value that each task gives an image, [tasks]."""
        return self._ranks.least_p_values(alpha)

    def blind_tasks(self, alpha: float | None = None) -> list[int]:
        """The tasks with too few stored scores to reject an image: with one of them, no image is called unknown.

        If the surprise over all tasks is ranked among known images, only the number of these counts.
        """
        level = self.alpha if alpha is None else alpha
        if self.overall is not None:
            return [] if self.overall.least_p_value < level else list(range(len(self.tasks)))
        return self._ranks.blind(level)

    def unknown_scores(self, scores: Array, alpha: float) -> Array:
        """The surprise at scores [batch, tasks], within the threshold for tasks that cannot reject at this alpha."""
        return self._ranks.bounded(scores, alpha)

    def overall_unknown_score(self, scores: Array, p_task: Array, alpha: float) -> Array:
        """The unknown score over all tasks [batch], of scores and probabilities of tasks [batch, tasks], if it is
        ranked among known images."""
        assert self._overall_ranks is not None
        surprises = self.surprise(scores)
        found = expected_surprises(surprises, p_task) if self.by_expectation else surprises.min(axis=1)
        return self._overall_ranks.bounded(found[:, None], alpha)[:, 0]

    @cached_property
    def _ranks(self) -> Ranks:
        return Ranks(self.tasks) if self.overall is not None or len(self.tasks) == 1 else MixedRanks(self.tasks)

    @cached_property
    def _overall_ranks(self) -> Ranks | None:
        return None if self.overall is None else Ranks((self.overall,))

    @property
    def columns(self) -> list[slice]:
        """Each task's columns in the outputs."""
        return [
            slice(int(start), int(start) + task.classes) for start, task in zip(self.starts, self.tasks, strict=True)
        ]

    @cached_property
    def starts(self) -> Starts:
        """Each task's first column in the outputs."""
        return np.cumsum([0, *(task.classes for task in self.tasks[:-1])])

    @cached_property
    def task_of_class(self) -> Starts:
        """class_id -> task."""
        return np.repeat(np.arange(len(self.tasks)), [task.classes for task in self.tasks])


class Verdicts(NamedTuple):
    """Decisions for a batch; `class_id` and `task` are the best guess even if the image is unknown."""

    class_id: NDArray[np.int64]  # [batch]
    task: NDArray[np.int64]  # [batch]
    known: NDArray[np.bool_]  # [batch]
    p_value: Array  # [batch]
    unknown_score: Array  # [batch], -log10 of the p-value, beyond the least p-value extrapolated; above: unknown
    task_unknown_score: Array  # [batch, tasks]
    p_task: Array  # [batch, tasks]
    p_within_task: Array  # [batch, classes]
    probability: Array  # [batch, classes], p_within_task * p_task


def complete(outputs: Outputs, rule: Rule) -> dict[str, NDArray[Any]]:
    """All inputs of the decision from the network's outputs. The graph computes the same in its last nodes."""
    logits, distances = (np.asarray(outputs[name], dtype=np.float64) for name in NETWORK_NAMES)
    scores = np.minimum.reduceat(distances, rule.starts, axis=1)
    p_within_task = _softmax(logits, rule.starts, rule.task_of_class)
    if rule.joint:
        probability = _softmax(logits, _WHOLE_ROW)
        p_task = np.add.reduceat(probability, rule.starts, axis=1)
    else:
        p_task = _softmax(-scores, _WHOLE_ROW)
        probability = p_within_task * p_task[:, rule.task_of_class]
    return dict(zip(OUTPUT_NAMES, (logits, distances, scores, p_task, p_within_task, probability), strict=True))


def decide(outputs: Outputs, rule: Rule, *, alpha: float | None = None, given_task: int | None = None) -> Verdicts:
    """Decide every row of a batch; with `given_task` only among that task's classes (task-incremental learning)."""
    scores, p_task, p_within_task, probability = (outputs[name] for name in OUTPUT_NAMES[len(NETWORK_NAMES) :])
    level = rule.alpha if alpha is None else alpha
    surprise = rule.unknown_scores(scores, level)
    least = rule.least_p_values(level)
    if given_task is not None:
        unknown_score, least_p_value = surprise[:, given_task], least[given_task]
        p_task = np.zeros_like(p_task)
        p_task[:, given_task] = 1.0
        probability = p_within_task * p_task[:, rule.task_of_class]
    elif rule.overall is None:
        unknown_score, least_p_value = surprise.min(axis=1), least[surprise.argmin(axis=1)]
    else:
        unknown_score, least_p_value = rule.overall_unknown_score(scores, p_task, level), rule.overall.least_p_value
    class_id = probability.argmax(axis=1)
    return Verdicts(
        class_id=class_id,
        task=rule.task_of_class[class_id],
        known=unknown_score <= threshold(level),
        p_value=np.maximum(10**-unknown_score, least_p_value),
        unknown_score=unknown_score,
        task_unknown_score=surprise,
        p_task=p_task,
        p_within_task=p_within_task,
        probability=probability,
    )


def judge(outputs: Outputs, rule: Rule, *, alpha: float | None = None, given_task: int | None = None) -> Verdicts:
    """Decide from the outputs of a network that has no graph to compute the rest."""
    return decide(complete(outputs, rule), rule, alpha=alpha, given_task=given_task)


def _softmax(values: Array, starts: Starts, part: Starts | slice = slice(None)) -> Array:
    """Softmax within each part of a row; `part` is the part that each column belongs to."""
    exponentials = np.exp(values - np.maximum.reduceat(values, starts, axis=1)[:, part])
    probabilities: Array = exponentials / np.add.reduceat(exponentials, starts, axis=1)[:, part]
    return probabilities
