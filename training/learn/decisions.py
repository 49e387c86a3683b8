"""The decisions that a run offers, and the choice of the one that it is served with."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.detectors import Decision, decisions
from models.detectors.score import Means
from models.detectors.task_scorer import TaskScorer, plain_scorer, standardise
from models.network import Network
from serving.bundle.decision import NETWORK_NAMES, Rule, TaskRule, judge
from serving.bundle.own_scores import threshold
from training.data.tasks import Batchable
from training.learn.correction import Correction
from training.learn.measurements import task_measurements

LEAST_PROBABILITY = 1e-12
AUTO = "auto"
"""The decision that the run chose on validation images."""
CANDIDATES = ("fused", "features", "shallow", "relative+energy", "mahalanobis", "max_logit", "paper")
"""The decisions that a run chooses from; the first of equals wins."""
CONSTANT = 1e-5
"""Below this standard deviation over a task's own images, a score is constant up to rounding errors."""
WORTH_CHANGING = 1.0
"""Nats per task by which another decision must be better than the one that a run answers by."""

Nats = dict[str, float]


@dataclass(frozen=True)
class Decider:
    """A decision with every task's side of it."""

    name: str
    scorers: tuple[TaskScorer, ...]
    rule: Rule

    def outputs(self, measurements: Sequence[Means]) -> dict[str, NDArray[Any]]:
        """The network's outputs [n, classes of all tasks], from every task's measurements of a batch."""
        pairs = [(scorer.logits(own), scorer.distances(own))
                 for scorer, own in zip(self.scorers, measurements, strict=True)]  # fmt: skip
        joined = (torch.cat(columns, dim=1).cpu().numpy() for columns in zip(*pairs, strict=True))
        return dict(zip(NETWORK_NAMES, joined, strict=True))


def offered_decisions(network: Network, corrections: Sequence[Correction] = ()) -> list[str]:
    """The decisions that all tasks of a run have the scores for; +c needs the corrections of a run with a buffer."""
    return [
        name
        for name, decision in decisions().items()
        if not (decision.corrected and not corrections) and not _missing_scores(network, decision)
    ]


def _missing_scores(network: Network, decision: Decision) -> list[str]:
    tasks = range(len(network.heads))
    return sorted({name for task in tasks for name in network.detector(task).missing(decision)})


def make_decider(network: Network, name: str, alpha: float, corrections: Sequence[Correction] = ()) -> Decider:
    """Fit a decision to the memory of all tasks learned so far; `corrections` are those of a run with a buffer."""
    known = decisions()
    if name not in known:
        raise ValueError(f"decision is {name!r}; allowed: {', '.join(known)}")
    decision = known[name]
    if decision.corrected and not corrections:
        raise ValueError(f"decision {name} needs images to correct the tasks by: learn the run with --buffer")
    if missing := _missing_scores(network, decision):
        raise ValueError(
            f"decision {name} needs the score {', '.join(missing)}, which was added after this run was learned: learn "
            f"the run again, or choose one of: {', '.join(offered_decisions(network, corrections))}"
        )
    sides = [task_side(network, task, decision, alpha, corrections) for task in range(len(network.heads))]
    scorers, rules = zip(*sides, strict=True)
    return Decider(name, scorers, Rule(score=name, alpha=alpha, tasks=rules))


def task_side(
    network: Network, task: int, decision: Decision, alpha: float, corrections: Sequence[Correction] = ()
) -> tuple[TaskScorer, TaskRule]:
    """A task's part of a decision, fitted to its memory; `alpha` is the level at which it has to be able to reject."""
    head, detector = network.head(task), network.detector(task)
    own = detector.memory()
    scale, shift = corrections[task] if decision.corrected else (float(head.scale), float(head.shift))
    scores = [detector.score(name) for name in decision.scores]
    uneven = detector.remembered_classes if detector.is_uneven and len(detector.remembered_classes) else None
    scorer = standardise(decision, scores, own, scale, shift, uneven)
    return scorer, _task_rule(scorer.task_scores(own).cpu().numpy(), head.classes, uneven, alpha)


def _task_rule(scores: NDArray[Any], classes: int, uneven: Tensor | None, alpha: float) -> TaskRule:
    """Uneven classes count equally, or the images of a rare class would hardly count in what is usual for the task. If
    a class has too few images to reject any image so, every image counts the same."""
    if uneven is not None:
        rule = TaskRule.fit(scores, classes, local_classes=uneven.cpu().numpy())
        if rule.least_p_value < alpha:
            return rule
    return TaskRule.fit(scores, classes)


def cross_entropies(network: Network, validation: Batchable, alpha: float) -> Nats:
    """The cross-entropy of each candidate on the newest task's validation images, summed over the images: -log p of the
    true class among all classes.

    These images are foreign to all earlier tasks, and are available while their own task is learned. So a run can
    choose its decision without storing an image and without seeing an unknown one. Probabilities tell more than the
    number of mistakes: a decision by which one task narrowly wins another's images is not certain of either.
    """
    newest = len(network.heads) - 1
    measurements = [task_measurements(network, task, validation.pixels) for task in range(newest + 1)]
    offered = offered_decisions(network)
    nats = {}
    for name in (name for name in CANDIDATES if name in offered and not has_constant_score(network, name)):
        decider = make_decider(network, name, alpha)
        class_ids = decider.rule.columns[newest].start + validation.local_classes.cpu().numpy()
        verdicts = judge(decider.outputs(measurements), decider.rule)
        probability = verdicts.probability[np.arange(len(class_ids)), class_ids]
        nats[name] = round(float(-np.log(np.maximum(probability, LEAST_PROBABILITY)).sum()), 6)
    return nats


def added(before: Mapping[str, float], more: Mapping[str, float]) -> Nats:
    """Sums over all tasks so far."""
    return {name: before.get(name, 0.0) + nats for name, nats in more.items()}


def choose(nats: Mapping[str, float], current: str | None = None, tasks: int = 1) -> str:
    """The candidate with the smallest cross-entropy; the first among equals, or if nothing was measured.

    A run that answers by `current` keeps it unless another is better by WORTH_CHANGING for each of its tasks.
    """
    best = min(CANDIDATES, key=lambda name: nats.get(name, math.inf))
    if current is not None and current in nats and nats[current] - nats[best] <= WORTH_CHANGING * tasks:
        return current
    return best


def has_constant_score(network: Network, name: str) -> bool:
    """Whether some score of a decision is the same for all of a task's own images, as are some with a single class: it
    separates nothing. The paper's decisions are compared as they are."""
    decision = decisions()[name]
    if not decision.standardised:
        return False
    for detector in map(network.detector, range(len(network.heads))):
        for score in map(detector.score, decision.scores):
            alone = plain_scorer(decision, [score], detector.classes, 1.0, 0.0)
            if float(alone.task_scores(detector.memory()).std(correction=0)) < CONSTANT:
                return True
    return False


def changed_acceptance(network: Network, before: str, after: str, alpha: float) -> tuple[int, int]:
    """How many of the images whose measurements are stored their own tasks accept by one of two decisions only, and how
    many there are."""
    changed = total = 0
    sides = zip(*(_sides(make_decider(network, name, alpha)) for name in (before, after)), strict=True)
    for task, pair in enumerate(sides):
        memory = network.detector(task).memory()
        accepted = [
            rule.unknown_scores(scorer.task_scores(memory).cpu().numpy()[:, None], alpha)[:, 0] <= threshold(alpha)
            for scorer, rule in pair
        ]
        changed += int((accepted[0] != accepted[1]).sum())
        total += len(accepted[0])
    return changed, total


def changed_answers(
    network: Network, before: str, after: str, alpha: float, images: Sequence[Batchable]
) -> tuple[int, int, int]:
    """How many of some images get another class by one of two decisions than by the other, how many are known by one
    only, and how many images there are."""
    classes = accepted = total = 0
    deciders = [make_decider(network, name, alpha) for name in (before, after)]
    for each in images:
        measured = [task_measurements(network, task, each.pixels) for task in range(len(network.heads))]
        old, new = (judge(decider.outputs(measured), decider.rule) for decider in deciders)
        classes += int((old.class_id != new.class_id).sum())
        accepted += int((old.known != new.known).sum())
        total += len(each)
    return classes, accepted, total


def _sides(decider: Decider) -> list[tuple[TaskScorer, Rule]]:
    """Every task's side of a decision, with a rule of its own."""
    return [(scorer, decider.rule.of([task])) for task, scorer in enumerate(decider.scorers)]
