"""How foreign an image is to each class of a task: scores, and the decisions that are made of them.

One sign throughout: higher is more unknown. A score is a pure function of what a task's network says of an image,
averaged over the four rotations. Decisions are sums of scores, made comparable between tasks that never saw each
other's images by two things that each task knows of itself: what the sum is on its own validation images, and what it
is on the same images turned, which are foreign by CSI's own reasoning.

Say that a task's own images have scores around 0 with a spread of 1, and foreign ones around r, the task's reach. Then
r s - r^2 / 2 is the log-likelihood ratio of foreign against own (for two Gaussians of that spread), and a softmax over
all tasks of the negative ratios gives the probability of each (Theorem 2 with the likelihood ratio as P'_k). A task
that tells little apart has a small reach and says little for or against itself, where a plain comparison of scores
would let it take every other task's images by chance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

Said = Mapping[str, Tensor]
"""Ingredient -> [n, classes of the task]."""

INGREDIENTS = ("logits", "tied", "shallow", "deep", "background", "residual")
TINY = 1e-3
"""A squared distance, per feature, that is as good as none."""
LEAST_SPREAD, LEAST_SPREAD_OF_SUM = 1e-3, 0.1
"""Scores that hardly differ on a task's own images are not blown up beyond this: rounding would decide."""
LEAST_AWAY = 0.01
"""The least mean score of turned images: a task that cannot tell them from its own at all still has a say."""


class Part(NamedTuple):
    """One score: the ingredients that it reads, and what it makes of them: [n, classes], or [n, 1] for the task."""

    needs: tuple[str, ...]
    of: Callable[[Said], Tensor]


def _energy(said: Said) -> Tensor:
    return -said["logits"].logsumexp(dim=1, keepdim=True)


PARTS: dict[str, Part] = {
    "max_logit": Part(("logits",), lambda said: -said["logits"]),
    "max_softmax": Part(("logits",), lambda said: -said["logits"].softmax(dim=1)),
    "energy": Part(("logits",), _energy),
    "mahalanobis": Part(("tied",), lambda said: said["tied"].clamp(min=TINY).log()),
    "relative": Part(("tied", "background"), lambda said: said["tied"] - said["background"]),
    "vim": Part(("residual", "logits"), lambda said: said["residual"][:, :1] + _energy(said)),
    "shallow": Part(("shallow",), lambda said: said["shallow"]),
    "deep": Part(("deep",), lambda said: said["deep"]),
}


@dataclass(frozen=True)
class Decision:
    """Which scores decide, and how."""

    parts: tuple[str, ...]
    standardised: bool = True
    """Without it scores are compared as they are, on the head's own logits: the paper's argmax."""
    corrected: bool = False
    """On logits that were corrected on a buffer: the paper's +c."""

    @property
    def needs(self) -> tuple[str, ...]:
        """The ingredients, in the order of all of them."""
        wanted = {"logits", *(name for part in self.parts for name in PARTS[part].needs)}
        return tuple(name for name in INGREDIENTS if name in wanted)


DECISIONS: dict[str, Decision] = {
    "features": Decision(("shallow", "deep")),
    "fused": Decision(("shallow", "deep", "energy")),
    "relative+energy": Decision(("relative", "energy")),
    "mahalanobis": Decision(("mahalanobis",)),
    "shallow": Decision(("shallow",)),
    "deep": Decision(("deep",)),
    "relative": Decision(("relative",)),
    "vim": Decision(("vim",)),
    "energy": Decision(("energy",)),
    "max_logit": Decision(("max_logit",)),
    "max_softmax": Decision(("max_softmax",)),
    # Softmax of log-sum-exps, times softmax within each task: the softmax of all logits side by side.
    "paper": Decision(("energy",), standardised=False),
    "paper+c": Decision(("energy",), standardised=False, corrected=True),
}


@dataclass(frozen=True)
class TaskScorer:
    """One task's side of a decision: numbers that were fixed when the task was learned."""

    decision: Decision
    classes: int
    scale: float
    shift: float
    weights: tuple[float, ...]
    bias: float

    def logits(self, said: Said) -> Tensor:
        """Calibrated, [n, classes]."""
        return said["logits"] * self.scale + self.shift

    def distances(self, said: Said) -> Tensor:
        """How foreign the image is to each class, [n, classes]: at 0 it is as likely of the task as not."""
        calibrated = {**said, "logits": self.logits(said)}
        parts = [PARTS[name].of(calibrated) for name in self.decision.parts]
        total = sum(weight * part for weight, part in zip(self.weights, parts, strict=True))
        return total + torch.full_like(said["logits"], self.bias)

    def scaled(self, factor: float, shift: float) -> TaskScorer:
        """Scores s become factor * (s + shift)."""
        weights = tuple(weight * factor for weight in self.weights)
        return replace(self, weights=weights, bias=(self.bias + shift) * factor)

    def scores(self, said: Said) -> Tensor:
        """How foreign the image is to the task, [n]: as foreign as to its nearest class."""
        exact = {name: values.double() for name, values in said.items()}
        return self.distances(exact).amin(dim=1)


def standardise(decision: Decision, memory: Said, scale: float, shift: float) -> TaskScorer:
    """Fit a decision to what the task's network said of its own validation images, calibrated by scale and shift:
    their median score becomes 0, and its spread 1."""
    classes = memory["logits"].shape[1]
    if not decision.standardised:
        factor, offset = (scale, shift) if decision.corrected else (1.0, 0.0)
        return TaskScorer(decision, classes, factor, offset, (1.0,) * len(decision.parts), 0.0)
    weights, bias = [], 0.0
    for name in decision.parts:
        own = TaskScorer(Decision((name,)), classes, scale, shift, (1.0,), 0.0).scores(memory)
        weights.append(1 / max(float(own.std(correction=0)), LEAST_SPREAD))
        bias -= weights[-1] * float(own.mean())
    summed = TaskScorer(decision, classes, scale, shift, tuple(weights), bias)
    scores = summed.scores(memory)
    return summed.scaled(1 / max(float(scores.std(correction=0)), LEAST_SPREAD_OF_SUM), -float(scores.median()))


def weigh(scorer: TaskScorer, turned: Said) -> TaskScorer:
    """Make likelihood ratios of standardised scores, by what the task's network said of its own images when turned.

    Those are easier to tell than images of other tasks, the more so the better a task tells anything: as the reach, the
    root of their mean score was as good as or better than any multiple of it, on validation images of three data sets.
    """
    if not scorer.decision.standardised:
        return scorer
    reach = max(float(scorer.scores(turned).mean()), LEAST_AWAY) ** 0.5
    return scorer.scaled(reach, -reach / 2)
