"""The one decision rule: from what the network says to a class, a task, or "unknown".

Evaluation, the command line and the server all decide here, so the accuracy that was measured is the accuracy
that is served. Every row is decided alone: an answer never depends on its neighbours in a batch.

For every class the network says how foreign an image is to it (`distances`: higher is more unknown). A task is as
foreign as its nearest class: its score s_k(x), a log-likelihood ratio of foreign against own, by what the task knows of
itself. A task keeps the scores of its own validation images, and two things follow, comparable between tasks although
no two of them ever saw the same image:

- which task: P(x in task k) = P'_k(x) / sum_j P'_j(x) (Theorem 2) with P'_k = exp(-s_k), so that
  P(x in class c) = P(c | its task) * P(x in its task);
- known or not: the rank of s_k among those scores is a conformal p-value. An image is known if for some task it is
  at least alpha, which accepts at least 1 - alpha of every task's own images, whatever is learned later.
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
"""What a network says of a batch: each [batch, classes], a task's classes side by side.

The second is how foreign the image is to each class: at 0 it is as likely of the class's task as not.
"""

OUTPUT_NAMES = (*NETWORK_NAMES, "scores", "p_task", "p_within_task", "probability")
"""What a decision reads and the graph returns: `scores` and `p_task` are [batch, tasks], the rest [batch, classes]."""

FEATURES = "features"
"""What the graph returns on demand: every task's standardised features of the image, [batch, features of all tasks]."""


_WHOLE_ROW = np.array([0])


STEP_WIDTH, LEFT_OVER = 0.1, 0.1
"""A step of the p-value is spread over this share of the tail, which leaves this share of it to the rest of the gap."""


class TaskRule(BaseModel):
    """What the decision remembers of one task: numbers, no images."""

    model_config = ConfigDict(frozen=True)

    classes: int = Field(gt=0, description="how many columns of the outputs are this task's")
    validation_scores: tuple[float, ...] = Field(
        min_length=1, description="distinct scores of the task's own validation images, ascending"
    )
    validation_counts: tuple[int, ...] = Field(description="how many validation images had each score")
    tail: float = Field(gt=0, description="beyond the last validation score, p falls tenfold over this")

    @model_validator(mode="after")
    def _check(self) -> TaskRule:
        if len(self.validation_counts) != len(self.validation_scores):
            raise ValueError(
                f"validation_counts has {len(self.validation_counts)} entries, validation_scores "
                f"{len(self.validation_scores)}: one count for each score is needed"
            )
        if any(b <= a for a, b in zip(self.validation_scores, self.validation_scores[1:], strict=False)):
            raise ValueError("validation_scores must rise strictly")
        return self

    @classmethod
    def fit(cls, scores: Sequence[float] | Array, classes: int) -> TaskRule:
        """Remember the scores of a task's own validation images."""
        every = np.asarray(scores, dtype=np.float64)
        if every.size == 0 or not np.isfinite(every).all():
            raise ValueError(f"validation scores must be finite numbers, at least one; got {every[:5]}")
        values, counts = np.unique(every, return_counts=True)
        center = float(np.median(every))
        upper = every[every > center]
        return cls(
            classes=classes,
            validation_scores=tuple(map(float, values)),
            validation_counts=tuple(map(int, counts)),
            tail=float(np.mean(upper - center)) if upper.size else 1.0,
        )

    @cached_property
    def p_value_curve(self) -> tuple[Array, Array]:
        """Scores and the conformal p-values (1 + #{s_i >= s}) / (n + 1) at them, to be joined by straight lines.

        Two points for each validation score: at it, and shortly after, when the step down is almost done. So the line
        stays just above the step function, and acceptance of the task's own images is still at least 1 - alpha.
        """
        knots = np.asarray(self.validation_scores)
        counts = np.asarray(self.validation_counts)
        at_least = counts[::-1].cumsum()[::-1]
        gaps = np.append(np.diff(knots), np.inf)
        points = np.stack([knots, knots + np.minimum(STEP_WIDTH * self.tail, gaps / 2)], axis=1)
        heights = np.stack([1.0 + at_least, 1.0 + at_least - (1 - LEFT_OVER) * counts], axis=1)
        return points.ravel(), heights.ravel() / (counts.sum() + 1)


class Rule(BaseModel):
    """The decision for a whole network: which score, at which level, and every task's memory of it."""

    model_config = ConfigDict(frozen=True)

    score: str = Field("features", description="the name of the decision that the distances were made by")
    alpha: float = Field(0.05, gt=0, lt=1, description="share of known images that may be called unknown")
    tasks: tuple[TaskRule, ...] = Field(min_length=1)

    def surprise(self, scores: Array) -> Array:
        """-log10 of the p-values of scores [batch, tasks], continuous and strictly rising.

        Beyond a task's last validation score it rises in a straight line: that ranks what is foreign, and matters to no
        alpha above 1 / (n + 1).
        """
        p_values = np.empty(scores.shape)
        for number, task in enumerate(self.tasks):
            p_values[:, number] = np.interp(scores[:, number], *task.p_value_curve)
        last, tail = self._ends
        surprise: Array = np.maximum(scores - last, 0.0) / tail - np.log10(p_values)
        return surprise

    @cached_property
    def _ends(self) -> tuple[Array, Array]:
        """Where each task's p-value curve ends, and over how much p falls tenfold from there."""
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
    """Decisions for a batch; `class_id` and `task` are the best guess even where it is called unknown."""

    class_id: NDArray[np.int64]  # [batch]
    task: NDArray[np.int64]  # [batch]
    known: NDArray[np.bool_]  # [batch]
    p_value: Array  # [batch]
    unknown_score: Array  # [batch], -log10 of the p-value
    task_unknown_score: Array  # [batch, tasks]
    p_task: Array  # [batch, tasks]
    p_within_task: Array  # [batch, classes]
    probability: Array  # [batch, classes], p_within_task * p_task


def threshold(alpha: float) -> float:
    """The unknown_score above which an answer is "unknown": -log10(alpha)."""
    return float(-np.log10(alpha))


def complete(outputs: Outputs, rule: Rule) -> dict[str, NDArray[Any]]:
    """All that a decision reads, from what the network says. The graph does the same in its last nodes."""
    logits, distances = (np.asarray(outputs[name], dtype=np.float64) for name in NETWORK_NAMES)
    scores = np.minimum.reduceat(distances, rule.starts, axis=1)
    p_task = _softmax(-scores, _WHOLE_ROW)
    p_within_task = _softmax(logits, rule.starts, rule.task_of_class)
    probability = p_within_task * p_task[:, rule.task_of_class]
    return dict(zip(OUTPUT_NAMES, (logits, distances, scores, p_task, p_within_task, probability), strict=True))


def decide(outputs: Outputs, rule: Rule, *, alpha: float | None = None, given_task: int | None = None) -> Verdicts:
    """Decide every row of a batch; `given_task` asks for the answer within that task (TIL)."""
    scores, p_task, p_within_task, probability = (outputs[name] for name in OUTPUT_NAMES[len(NETWORK_NAMES) :])
    surprise = rule.surprise(scores)
    if given_task is None:
        unknown_score = surprise.min(axis=1)
    else:
        unknown_score = surprise[:, given_task]
        p_task = np.zeros_like(p_task)
        p_task[:, given_task] = 1.0
        probability = p_within_task * p_task[:, rule.task_of_class]
    class_id = probability.argmax(axis=1)
    level = rule.alpha if alpha is None else alpha
    return Verdicts(
        class_id=class_id,
        task=rule.task_of_class[class_id],
        known=unknown_score <= threshold(level),
        p_value=10**-unknown_score,
        unknown_score=unknown_score,
        task_unknown_score=surprise,
        p_task=p_task,
        p_within_task=p_within_task,
        probability=probability,
    )


def judge(outputs: Outputs, rule: Rule, *, alpha: float | None = None, given_task: int | None = None) -> Verdicts:
    """Decide from what a network says, where no graph has completed it."""
    return decide(complete(outputs, rule), rule, alpha=alpha, given_task=given_task)


def _softmax(values: Array, starts: Starts, part: Starts | slice = slice(None)) -> Array:
    """Softmax within each part of a row; `part` says which part a column belongs to."""
    raised = np.exp(values - np.maximum.reduceat(values, starts, axis=1)[:, part])
    probabilities: Array = raised / np.add.reduceat(raised, starts, axis=1)[:, part]
    return probabilities
