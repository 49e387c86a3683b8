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
PRIOR_IMAGES = 10
"""The variance of all images counts as this many images of each class: a dozen images estimate one badly."""


@dataclass(frozen=True)
class TaskScorer:
    """One task's side of a decision: numbers that are fixed when the task is learned."""

    decision: Decision
    scores: tuple[UnknownScore, ...] = field(compare=False)
    scale: float
    shift: float
    weights: tuple[tuple[float, ...], ...]
    """One per score and class. They differ between the classes only where the classes are uneven."""
    bias: tuple[float, ...]
    """One per class."""

    def logits(self, means: Means) -> Tensor:
        """Calibrated logits, [n, classes]."""
        return means["logits"] * self.scale + self.shift

    def distances(self, means: Means) -> Tensor:
        """How unlike each class the image is, [n, classes]: around 0 for an image of the class."""
        calibrated = {**means, "logits": self.logits(means)}
        logits = means["logits"]
        total = logits.new_tensor(self.bias).expand(len(logits), -1)
        for score, weights in zip(self.scores, self.weights, strict=True):
            total = total + logits.new_tensor(weights) * score.score(calibrated)
        return total

    def task_scores(self, means: Means) -> Tensor:
        """How unlike the task the image is, [n]: the distance from its nearest class."""
        exact = {name: values.double() for name, values in means.items()}
        return self.distances(exact).amin(dim=1)

    def scaled(self, factor: float, shift: float) -> TaskScorer:
        """Scores s become factor * (s + shift)."""
        weights = tuple(tuple(weight * factor for weight in each) for each in self.weights)
        return replace(self, weights=weights, bias=tuple((each + shift) * factor for each in self.bias))


def plain_scorer(
    decision: Decision, scores: Sequence[UnknownScore], classes: int, scale: float, shift: float
) -> TaskScorer:
    """The sum of the scores as they are."""
    return TaskScorer(decision, tuple(scores), scale, shift, ((1.0,) * classes,) * len(scores), (0.0,) * classes)


def standardise(
    decision: Decision,
    scores: Sequence[UnknownScore],
    own: Means,
    scale: float,
    shift: float,
    local_classes: Tensor | None = None,
) -> TaskScorer:
    """Fit a decision to the measurements of the task's own images, with logits calibrated by scale and shift: their
    median score becomes 0, and the mean excess of the scores above it 1.

    Each score is first standardised to mean 0 and deviation 1 over all images or, with their `local_classes` [n], for
    each class over its own: one deviation for all would be that of the largest class.
    """
    classes = own["logits"].shape[1]
    if not decision.standardised:
        factor, offset = (scale, shift) if decision.corrected else (1.0, 0.0)
        return plain_scorer(decision, scores, classes, factor, offset)
    exact = {name: values.double() for name, values in own.items()}
    weights, bias = [], torch.zeros(classes, dtype=torch.float64, device=exact["logits"].device)
    for score in scores:
        distances = plain_scorer(decision, [score], classes, scale, shift).distances(exact)
        means, deviations = _moments(distances, local_classes)
        weights.append(tuple((1 / deviations).tolist()))
        bias -= means / deviations
    summed = TaskScorer(decision, tuple(scores), scale, shift, tuple(weights), tuple(bias.tolist()))
    total = summed.task_scores(own)
    excess = total[total > total.median()] - total.median()
    mean_excess = float(excess.mean()) if len(excess) else 0.0
    return summed.scaled(1 / max(mean_excess, LEAST_EXCESS), -float(total.median()))


def _moments(distances: Tensor, local_classes: Tensor | None) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation for each class [classes], of distances [n, classes] of the task's own images."""
    nearest = distances.amin(dim=1)
    means, variances = (
        value.expand(distances.shape[1]).clone() for value in (nearest.mean(), nearest.var(correction=0))
    )
    if local_classes is not None:
        for local_class in range(distances.shape[1]):
            own = distances[local_classes == local_class, local_class]
            if len(own):
                means[local_class] = own.mean()
                variances[local_class] = (
                    len(own) * own.var(correction=0) + PRIOR_IMAGES * nearest.var(correction=0)
                ) / (len(own) + PRIOR_IMAGES)
    return means, variances.sqrt().clamp(min=LEAST_SPREAD)
