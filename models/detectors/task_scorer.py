"""How one task's scores are summed and made comparable with those of other tasks.

Tasks never see each other's images. Their scores become comparable by what each task knows of itself: the scores of its
own images, measured by detectors that were not fitted to them. Own images have scores around 0, and their excess over
the median is 1 on average.

Let the excess be exponentially distributed, and the scores of foreign images spread evenly over a wide range. Then
exp(-s) is the likelihood ratio of own against foreign, up to a factor, and a softmax over all tasks of -s gives the
probability of each (Theorem 2 with the likelihood ratio as P'_k).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from models.detectors import Decision
from models.detectors.score import Means, UnknownScore

LEAST_SPREAD, LEAST_EXCESS = 1e-3, 0.05
"""Scores that hardly differ on a task's own images are not scaled up beyond this: rounding errors would decide."""


@dataclass(frozen=True)
class TaskScorer:
    """One task's side of a decision: numbers that are fixed when the task is learned."""

    decision: Decision
    scores: tuple[UnknownScore, ...] = field(compare=False)
    scale: float
    shift: float
    weights: tuple[float, ...]
    bias: float

    def logits(self, means: Means) -> Tensor:
        """Calibrated logits, [n, classes]."""
        return means["logits"] * self.scale + self.shift

    def distances(self, means: Means) -> Tensor:
        """How unlike each class the image is, [n, classes]: around 0 for an image of the class."""
        calibrated = {**means, "logits": self.logits(means)}
        parts = [score.score(calibrated) for score in self.scores]
        total = sum(weight * part for weight, part in zip(self.weights, parts, strict=True))
        return total + torch.full_like(means["logits"], self.bias)

    def task_scores(self, means: Means) -> Tensor:
        """How unlike the task the image is, [n]: the distance from its nearest class."""
        exact = {name: values.double() for name, values in means.items()}
        return self.distances(exact).amin(dim=1)

    def scaled(self, factor: float, shift: float) -> TaskScorer:
        """Scores s become factor * (s + shift)."""
        weights = tuple(weight * factor for weight in self.weights)
        return replace(self, weights=weights, bias=(self.bias + shift) * factor)


def standardise(
    decision: Decision, scores: Sequence[UnknownScore], own: Means, scale: float, shift: float
) -> TaskScorer:
    """Fit a decision to the measurements of the task's own images, with logits calibrated by scale and shift: their
    median score becomes 0, and the mean excess of the scores above it 1."""
    scores = tuple(scores)
    if not decision.standardised:
        factor, offset = (scale, shift) if decision.corrected else (1.0, 0.0)
        return TaskScorer(decision, scores, factor, offset, (1.0,) * len(scores), 0.0)
    weights, bias = [], 0.0
    for score in scores:
        alone = TaskScorer(decision, (score,), scale, shift, (1.0,), 0.0).task_scores(own)
        weights.append(1 / max(float(alone.std(correction=0)), LEAST_SPREAD))
        bias -= weights[-1] * float(alone.mean())
    summed = TaskScorer(decision, scores, scale, shift, tuple(weights), bias)
    total = summed.task_scores(own)
    excess = total[total > total.median()] - total.median()
    mean_excess = float(excess.mean()) if len(excess) else 0.0
    return summed.scaled(1 / max(mean_excess, LEAST_EXCESS), -float(total.median()))
