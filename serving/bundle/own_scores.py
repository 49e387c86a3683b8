"""The scores of known images that a bundle stores, and the rank of a score among them: a conformal p-value."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

Array = NDArray[np.floating[Any]]

STEP_WIDTH, LEFT_OVER = 0.1, 1e-3
"""A step of the p-value falls over STEP_WIDTH of the tail by all but LEFT_OVER of its height; the rest falls slowly."""
OTHERS = 100
"""The weight of the scores of all tasks together, in scores, when a task's own scores are ranked."""


class OwnScores(BaseModel):
    """Scores of known images, among which the score of an image has a rank: numbers, no images."""

    model_config = ConfigDict(frozen=True)

    own_scores: tuple[float, ...] = Field(
        min_length=1, description="distinct scores of own images, by detectors not fitted to them, ascending"
    )
    own_counts: tuple[int, ...] = Field(description="how many images had each score")
    own_weights: tuple[float, ...] = Field(
        default=(), description="as how many images each score counts, if classes count equally; else empty"
    )
    tail: float = Field(gt=0, description="mean excess over the median score: beyond the last, images rank by it")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.own_weights and len(self.own_weights) != len(self.own_scores):
            raise ValueError(
                f"own_weights has {len(self.own_weights)} entries, own_scores {len(self.own_scores)}: one weight for "
                "each score is needed, or none"
            )
        if len(self.own_counts) != len(self.own_scores):
            raise ValueError(
                f"own_counts has {len(self.own_counts)} entries, own_scores {len(self.own_scores)}: one count for each "
                "score is needed"
            )
        if any(b <= a for a, b in zip(self.own_scores, self.own_scores[1:], strict=False)):
            raise ValueError("own_scores must rise strictly")
        return self

    @classmethod
    def rank(
        cls, scores: Sequence[float] | Array, local_classes: NDArray[np.integer] | None = None, **others: Any
    ) -> Self:
        """From the scores of the images; `others` are the fields of a subclass.

        With the class of each image, `local_classes` [n], a p-value is the mean over classes of the p-values among the
        images of each: the classes count equally, however many images they have.
        """
        every = np.asarray(scores, dtype=np.float64)
        if every.size == 0 or not np.isfinite(every).all():
            raise ValueError(f"own scores must be finite numbers, at least one; got {every[:5]}")
        values, place, counts = np.unique(every, return_inverse=True, return_counts=True)
        each = np.ones(len(every)) if local_classes is None else _equal_weights(local_classes)
        weights = np.bincount(place, weights=each).astype(np.float64)
        center = float(np.median(every)) if local_classes is None else _weighted_median(values, weights)
        upper = every > center
        return cls(
            own_scores=tuple(map(float, values)),
            own_counts=tuple(map(int, counts)),
            own_weights=() if local_classes is None else tuple(weights.tolist()),
            tail=float(np.average(every[upper] - center, weights=each[upper])) if upper.any() else 1.0,
            **others,
        )

    @property
    def images(self) -> int:
        """The number of images whose scores are stored."""
        return sum(self.own_counts)

    @property
    def least_p_value(self) -> float:
        """The smallest p-value that an image can have by these scores."""
        return 1 / self.size

    @property
    def size(self) -> float:
        """As how many images all scores count, plus one for the image that is ranked."""
        return 1 + sum(self.own_weights or self.own_counts)

    @property
    def weights(self) -> Array:
        """As how many images each score counts."""
        return np.asarray(self.own_weights or self.own_counts, dtype=np.float64)

    def surprise(self, scores: Array) -> Array:
        """-log10 of the p-values of scores [n], continuous and strictly rising beyond the last stored score."""
        return Ranks((self,)).surprise(scores[:, None])[:, 0]

    @cached_property
    def center(self) -> float:
        """The median of the scores."""
        if self.own_weights:
            return _weighted_median(np.asarray(self.own_scores), self.weights)
        return float(np.median(np.repeat(self.own_scores, self.own_counts)))

    @cached_property
    def p_value_curve(self) -> tuple[Array, Array]:
        """Scores and their conformal p-values (1 + #{s_i >= s}) / (n + 1), to be interpolated linearly.

        The line stays just above the step function, so acceptance of the task's own images is still at least 1 - alpha.
        """
        points, at_least = _steps(np.asarray(self.own_scores), self.weights, STEP_WIDTH * self.tail)
        return points, (1 + at_least) / self.size


class Ranks:
    """The ranks of scores [batch, n] among n sets of own scores."""

    def __init__(self, parts: Sequence[OwnScores]) -> None:
        self.parts = parts
        self.own_least = np.array([part.least_p_value for part in parts])
        self.last, self.tail = np.array([(part.p_value_curve[0][-1], part.tail) for part in parts]).T

    def least_p_values(self, alpha: float) -> Array:
        return self.own_least

    def surprise(self, scores: Array) -> Array:
        surprise: Array = np.maximum(scores - self.last, 0.0) / (self.tail * np.log(10))
        return surprise - np.log10(self.p_values(scores))

    def p_values(self, scores: Array) -> Array:
        p_values = np.empty(scores.shape)
        for number, part in enumerate(self.parts):
            p_values[:, number] = np.interp(scores[:, number], *part.p_value_curve)
        return p_values

    def blind(self, alpha: float) -> list[int]:
        return np.flatnonzero(self.own_least >= alpha).tolist()

    def bounded(self, scores: Array, alpha: float) -> Array:
        """The surprise, where with too few own scores to reject it approaches the threshold without passing it, so that
        images keep their order."""
        surprise = self.surprise(scores)
        limit = threshold(alpha)
        for number in self.blind(alpha):
            column = surprise[:, number]
            last = -np.log10(self.own_least[number])
            beyond, room = np.maximum(column - last, 0.0), max(limit - last, 0.0)
            bounded = last + room * beyond / (beyond + room) if room else last
            surprise[:, number] = np.minimum(np.where(beyond > 0, bounded, column), limit)
        return surprise


class MixedRanks(Ranks):
    """Ranks where the scores of all sets together count as OTHERS further scores of each set.

    Scores of different sets are compared relative to the median and the mean excess of their set.
    """

    def __init__(self, parts: Sequence[OwnScores]) -> None:
        super().__init__(parts)
        self.center, self.weight = np.array([(part.center, part.size) for part in parts]).T
        relative = [(np.asarray(part.own_scores) - part.center) / part.tail for part in parts]
        values, place = np.unique(np.concatenate(relative), return_inverse=True)
        counts = np.bincount(place, weights=np.concatenate([part.weights for part in parts])).astype(np.float64)
        self.points, at_least = _steps(values, counts, STEP_WIDTH)
        self.shares = at_least / counts.sum()
        self.last = self.center + self.tail * self.points[-1]

    def least_p_values(self, alpha: float) -> Array:
        return np.where(self.own_least >= alpha, self.own_least, 1 / (self.weight + OTHERS))

    def p_values(self, scores: Array) -> Array:
        shares = np.interp((scores - self.center) / self.tail, self.points, self.shares)
        mixed: Array = (self.weight * super().p_values(scores) + OTHERS * shares) / (self.weight + OTHERS)
        return mixed


def threshold(alpha: float) -> float:
    """-log10(alpha): the unknown_score above which an image is unknown."""
    return float(-np.log10(alpha))


def _equal_weights(local_classes: NDArray[np.integer]) -> Array:
    """As how many images each image [n] counts, so that (1 + sum of the weights at or above a score) / (1 + sum of all)
    is the mean over classes of (1 + #{s_i >= s}) / (n_c + 1)."""
    _, place, counts = np.unique(local_classes, return_inverse=True, return_counts=True)
    shares = 1 / (counts + 1)
    weights: Array = (shares / shares.sum())[place]
    return weights


def _weighted_median(values: Array, weights: Array) -> float:
    """The first of ascending values at which half of the weight is reached."""
    return float(values[np.searchsorted(weights.cumsum(), weights.sum() / 2)])


def _steps(values: Array, counts: Array, width: float) -> tuple[Array, Array]:
    """Values and how many of the counted ones are at least as large, to be interpolated linearly.

    There are two points per value: at the value, and shortly after it, when the step down is almost complete.
    """
    at_least = counts[::-1].cumsum()[::-1]
    gaps = np.append(np.diff(values), np.inf)
    points = np.stack([values, values + np.minimum(width, gaps / 2)], axis=1)
    heights = np.stack([at_least, at_least - (1 - LEFT_OVER) * counts], axis=1)
    return points.ravel(), heights.ravel()
