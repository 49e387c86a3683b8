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
  at least alpha. If the scores are of validation images, this accepts at least 1 - alpha of every task's own images on
  average, whatever is learned later. If scores of left-out training images are among them, the share is measured to be
  close to 1 - alpha, and not proven: the network has seen these images, though the detectors have not.
  A p-value is never below 1 / (N_k + 1), so a task with fewer than 1 / alpha scores rejects no image. Its unknown
  scores stay within the threshold, so that an image is known exactly if its unknown score is within it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

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


STEP_WIDTH, LEFT_OVER = 0.1, 0.1
"""A step of the p-value falls over STEP_WIDTH of the tail by all but LEFT_OVER of its height; the rest falls slowly."""


class TaskRule(BaseModel):
    """The statistics of one task that the decision needs: numbers, no images."""

    model_config = ConfigDict(frozen=True)

    classes: int = Field(gt=0, description="number of output columns of this task")
    own_scores: tuple[float, ...] = Field(
        min_length=1, description="distinct scores of the task's own images, by detectors not fitted to them, ascending"
    )
    own_counts: tuple[int, ...] = Field(description="how many images had each score")
    tail: float = Field(gt=0, description="mean excess over the median score: beyond the last, images rank by it")

    @model_validator(mode="after")
    def _check(self) -> TaskRule:
        if len(self.own_counts) != len(self.own_scores):
            raise ValueError(
                f"own_counts has {len(self.own_counts)} entries, own_scores {len(self.own_scores)}: one count for each "
                "score is needed"
            )
        if any(b <= a for a, b in zip(self.own_scores, self.own_scores[1:], strict=False)):
            raise ValueError("own_scores must rise strictly")
        return self

    @classmethod
    def fit(cls, scores: Sequence[float] | Array, classes: int) -> TaskRule:
        """The rule of a task from the scores of its own images."""
        every = np.asarray(scores, dtype=np.float64)
        if every.size == 0 or not np.isfinite(every).all():
            raise ValueError(f"own scores must be finite numbers, at least one; got {every[:5]}")
        values, counts = np.unique(every, return_counts=True)
        center = float(np.median(every))
        upper = every[every > center]
        return cls(
            classes=classes,
            own_scores=tuple(map(float, values)),
            own_counts=tuple(map(int, counts)),
            tail=float(np.mean(upper - center)) if upper.size else 1.0,
        )

    @property
    def images(self) -> int:
        """The number of images whose scores are stored."""
        return sum(self.own_counts)

    @property
    def least_p_value(self) -> float:
        """The smallest p-value that an image can have."""
        return 1 / (self.images + 1)

    @cached_property
    def p_value_curve(self) -> tuple[Array, Array]:
        """Scores and their conformal p-values (1 + #{s_i >= s}) / (n + 1), to be interpolated linearly.

        There are two points per stored score: at the score, and shortly after it, when the step down is almost
        complete. The line stays just above the step function, so acceptance of the task's own images is still at least
        1 - alpha.
        """
        knots = np.asarray(self.own_scores)
        counts = np.asarray(self.own_counts)
        at_least = counts[::-1].cumsum()[::-1]
        gaps = np.append(np.diff(knots), np.inf)
        points = np.stack([knots, knots + np.minimum(STEP_WIDTH * self.tail, gaps / 2)], axis=1)
        heights = np.stack([1.0 + at_least, 1.0 + at_least - (1 - LEFT_OVER) * counts], axis=1)
        return points.ravel(), heights.ravel() / (counts.sum() + 1)


class Rule(BaseModel):
    """The decision rule of a whole network: the score, the level alpha and the statistics of every task."""

    model_config = ConfigDict(frozen=True)

    score: str = Field("features", description="the name of the unknown score that the distances come from")
    alpha: float = Field(0.05, gt=0, lt=1, description="share of known images that may be called unknown")
    tasks: tuple[TaskRule, ...] = Field(min_length=1)
    joint: bool = Field(
        default=False, description="whether one softmax over the logits of all tasks gives the probabilities"
    )

    def surprise(self, scores: Array) -> Array:
        """-log10 of the p-values of scores [batch, tasks], continuous and strictly rising.

        Beyond a task's last stored score it rises linearly, as if the scores' tail were exponential. That ranks unknown
        images, and decides nothing: the p-value that decides is at least `least_p_value`.
        """
        p_values = np.empty(scores.shape)
        for number, task in enumerate(self.tasks):
            p_values[:, number] = np.interp(scores[:, number], *task.p_value_curve)
        last, tail = self._ends
        surprise: Array = np.maximum(scores - last, 0.0) / (tail * np.log(10)) - np.log10(p_values)
        return surprise

    @cached_property
    def least_p_values(self) -> Array:
        """Each task's smallest p-value, [tasks]."""
        return np.array([task.least_p_value for task in self.tasks])

    def blind_tasks(self, alpha: float | None = None) -> list[int]:
        """The tasks with too few stored scores to reject an image: with one of them, no image is called unknown."""
        level = self.alpha if alpha is None else alpha
        return np.flatnonzero(self.least_p_values >= level).tolist()

    def unknown_scores(self, scores: Array, alpha: float) -> Array:
        """The surprise at scores [batch, tasks], within the threshold for tasks that cannot reject at this alpha.

        Where such a task's surprise exceeds that of its least p-value, it approaches the threshold without passing it,
        so that images keep their order.
        """
        surprise = self.surprise(scores)
        limit = threshold(alpha)
        for task in self.blind_tasks(alpha):
            column = surprise[:, task]
            last = -np.log10(self.least_p_values[task])
            beyond, room = np.maximum(column - last, 0.0), max(limit - last, 0.0)
            bounded = last + room * beyond / (beyond + room) if room else last
            surprise[:, task] = np.minimum(np.where(beyond > 0, bounded, column), limit)
        return surprise

    @cached_property
    def _ends(self) -> tuple[Array, Array]:
        """Where each task's p-value curve ends, and its tail."""
        last, tail = np.array([(task.p_value_curve[0][-1], task.tail) for task in self.tasks]).T
        return last, tail

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


def threshold(alpha: float) -> float:
    """-log10(alpha): the unknown_score above which an image is unknown."""
    return float(-np.log10(alpha))


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
    least = rule.least_p_values
    if given_task is None:
        unknown_score, least_p_value = surprise.min(axis=1), least.max()
    else:
        unknown_score, least_p_value = surprise[:, given_task], least[given_task]
        p_task = np.zeros_like(p_task)
        p_task[:, given_task] = 1.0
        probability = p_within_task * p_task[:, rule.task_of_class]
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
