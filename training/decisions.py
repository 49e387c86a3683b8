"""Which decision a run is served with: every one that its tasks' memories allow, and the one that it chose itself."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.network import Network
from models.scores import DECISIONS, Decision, Said, TaskScorer, standardise, weigh
from serving.decision import NETWORK_NAMES, Rule, TaskRule, judge
from training.calibration import Correction
from training.classifier import task_said
from training.tasks import Batchable, to_device

LEAST_PROBABILITY = 1e-12
AUTO = "auto"
"""What the run chose on validation images."""
CANDIDATES = ("fused", "features", "relative+energy", "mahalanobis", "max_logit", "paper")
"""What a run chooses from, the first of equals."""

Nats = dict[str, float]
SaidByTasks = list[dict[str, Tensor]]
"""What every task says of a batch."""


@dataclass(frozen=True)
class Decider:
    """A decision with every task's side of it."""

    name: str
    scorers: tuple[TaskScorer, ...]
    rule: Rule

    def outputs(self, said: Sequence[Said]) -> dict[str, NDArray[Any]]:
        """What a decision reads, from what every task says of a batch: columns side by side."""
        pairs = [(scorer.logits(one), scorer.distances(one)) for scorer, one in zip(self.scorers, said, strict=True)]
        joined = (torch.cat(columns, dim=1).cpu().numpy() for columns in zip(*pairs, strict=True))
        return dict(zip(NETWORK_NAMES, joined, strict=True))


def make_decider(network: Network, name: str, alpha: float, corrections: Sequence[Correction] = ()) -> Decider:
    """Fit a decision to the memories of all tasks learned so far; `corrections` are those of a run with a buffer."""
    if name not in DECISIONS:
        raise ValueError(f"decision is {name!r}; allowed: {', '.join(DECISIONS)}")
    decision = DECISIONS[name]
    if decision.corrected and not corrections:
        raise ValueError(f"decision {name} needs images to correct the tasks by: learn the run with --buffer")
    sides = [_task_side(network, task, decision, corrections) for task in range(len(network.heads))]
    scorers, rules = zip(*sides, strict=True)
    return Decider(name, scorers, Rule(score=name, alpha=alpha, tasks=rules))


def _task_side(
    network: Network, task: int, decision: Decision, corrections: Sequence[Correction]
) -> tuple[TaskScorer, TaskRule]:
    head, detector = network.head(task), network.detector(task)
    memory = detector.remembered()
    scale, shift = corrections[task] if decision.corrected else (float(head.scale), float(head.shift))
    scorer = weigh(standardise(decision, memory, scale, shift), detector.remembered_turned())
    return scorer, TaskRule.fit(scorer.scores(memory).cpu().numpy(), head.classes)


def all_said(network: Network, pixels: NDArray[np.uint8], device: torch.device) -> SaidByTasks:
    """What every task says of uint8 images [n, height, width, channels]."""
    images = to_device(pixels, device)
    return [task_said(network, task, images) for task in range(len(network.heads))]


def cross_entropies(network: Network, validation: Batchable, alpha: float) -> Nats:
    """How badly each candidate foretells the class, among all classes, of the newest task's validation images: the sum
    of -log p.

    They are true outsiders to all earlier tasks, and are at hand while their own task is learned: so a run can choose
    its decision without keeping an image, and without ever seeing an unknown. Probabilities tell more than a count of
    mistakes: a decision that lets one task take what is another's by a hair is sure of little, in either direction.
    """
    newest = len(network.heads) - 1
    said = [task_said(network, task, validation.pixels) for task in range(newest + 1)]
    nats = {}
    for name in CANDIDATES:
        decider = make_decider(network, name, alpha)
        class_ids = decider.rule.columns[newest].start + validation.local_classes.cpu().numpy()
        probability = judge(decider.outputs(said), decider.rule).probability[np.arange(len(class_ids)), class_ids]
        nats[name] = round(float(-np.log(np.maximum(probability, LEAST_PROBABILITY)).sum()), 6)
    return nats


def added(before: Mapping[str, float], more: Mapping[str, float]) -> Nats:
    """Sums over all tasks so far."""
    return {name: before.get(name, 0.0) + nats for name, nats in more.items()}


def choose(nats: Mapping[str, float]) -> str:
    """The candidate with the smallest cross-entropy; among equals, and where nothing was measured, the first."""
    return min(CANDIDATES, key=lambda name: nats.get(name, math.inf))
