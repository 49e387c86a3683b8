"""Adaptive evaluation: all tasks see an image upright, and only those that can still win see it turned.

Those are the k that come nearest, less those that fall behind the best by more than a margin: few images leave any
doubt. Of T tasks, at most T + 3 k views are computed instead of 4 T. Here its answers are worked out without a graph,
to choose k and the margin, and to check the graph against.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from export.evidence import Evidence
from export.notes import counted, note
from models.heads import ROTATIONS
from models.network import Network
from serving.bundle import Cascade
from serving.decision import NETWORK_NAMES, Outputs, Verdicts, complete, judge
from training.classifier import EVALUATION_BATCH
from training.decisions import Decider
from training.tasks import to_device, to_unit

AGREEMENT = 0.999
"""The share of answers that may not change."""
WORTH_IT = 0.75
"""The share of all views that may be left to compute; a cascade that saves less is not worth its branches."""
MARGINS = (None, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Differences of scores, which are log-likelihood ratios; None: no margin."""
ENOUGH_IMAGES = 1000
"""With fewer, not even an agreement without a fault shows that much."""


class CascadeError(Exception):
    """A cascade that was asked for and cannot be had; the message says why."""


@dataclass(frozen=True)
class Rotated:
    """What every task says of a batch in each rotation: ingredient -> [rotations, n, columns]."""

    network: Network
    decider: Decider
    tasks: list[dict[str, Tensor]]

    @cached_property
    def full(self) -> Outputs:
        """The network's outputs over all rotations."""
        return self._mean(slice(None))

    @cached_property
    def upright(self) -> Outputs:
        """Its outputs for upright images."""
        return self._mean(slice(0, 1))

    @cached_property
    def upright_scores(self) -> NDArray[Any]:
        """How foreign upright images are to each task, [images, tasks]."""
        return complete(self.upright, self.decider.rule)["scores"]

    @cached_property
    def answers(self) -> Verdicts:
        """Those of the full evaluation."""
        return judge(self.full, self.decider.rule)

    def _mean(self, rotations: slice) -> Outputs:
        return self.decider.outputs(
            [
                self.network.detector(task).together({name: values[rotations] for name, values in said.items()})
                for task, said in enumerate(self.tasks)
            ]
        )


@torch.no_grad()
def rotated_outputs(network: Network, decider: Decider, pixels: NDArray[np.uint8]) -> Rotated:
    """What every task says in each rotation of uint8 images [n, height, width, channels]."""
    network.eval()
    images = to_device(pixels, next(network.parameters()).device)
    tasks = []
    for task in counted(range(len(network.heads)), f"tasks that have seen {len(pixels)} images in all rotations"):
        parts = [network.said(to_unit(part), task) for part in images.split(EVALUATION_BATCH)]
        tasks.append({name: torch.cat([part[name] for part in parts], dim=1) for name in parts[0]})
    return Rotated(network, decider, tasks)


def seen_again(said: Rotated, candidates: int, margin: float | None) -> NDArray[np.bool_]:
    """Which tasks see which upright images turned, [images, tasks]."""
    scores = said.upright_scores
    ascending = np.sort(scores, axis=1)
    last = ascending[:, candidates - 1 : candidates]
    if margin is not None:
        last = np.minimum(last, ascending[:, :1] + margin)
    again: NDArray[np.bool_] = scores <= last
    return again


def cascaded(said: Rotated, candidates: int | None, margin: float | None = None) -> Outputs:
    """The outputs where only the best tasks of each upright image see it turned."""
    if candidates is None:
        return said.full
    again = seen_again(said, candidates, margin)[:, said.decider.rule.task_of_class]
    return {name: np.where(again, said.full[name], said.upright[name]) for name in NETWORK_NAMES}


def agreement(said: Rotated, candidates: int, margin: float | None = None) -> float:
    """The share of images with the same class and the same "known" as in the full evaluation."""
    full, fast = said.answers, judge(cascaded(said, candidates, margin), said.decider.rule)
    return float(((full.class_id == fast.class_id) & (full.known == fast.known)).mean())


def choose_cascade(network: Network, decider: Decider, evidence: Evidence, wanted: str) -> Cascade:
    """How many tasks see an image turned: `wanted` is on, off, or auto (on if that is shown to change nothing)."""
    tasks, off = len(decider.scorers), Cascade(candidates=None, agreement=None, images=0)
    reason = _impossible(network, tasks, evidence)
    if wanted == "on" and reason:
        raise CascadeError(f"--cascade on: {reason}")
    if wanted == "off" or reason or (wanted == "auto" and not _enough(tasks, evidence)):
        return off
    said = rotated_outputs(network, decider, evidence.pixels)
    measured = [_smallest(said, margin) for margin in MARGINS]
    good = [found for found in measured if _agrees(found)]
    if good:
        best = min(good, key=lambda found: found.seen or 0)
        if wanted == "on" or views(tasks, best.seen or 0) <= WORTH_IT * views(tasks, tasks):
            return best
        # It would change nothing and save little: how many tasks would see an image turned tells that.
        return best.model_copy(update={"candidates": None, "margin": None})
    highest = max(found.agreement or 0 for found in measured)
    if wanted == "on":
        raise CascadeError(
            f"--cascade on: at most {highest:.2%} of {len(evidence)} validation images are answered as by "
            f"the full evaluation; needed {AGREEMENT:.1%}"
        )
    return Cascade(candidates=None, agreement=highest, images=len(evidence))


def views(tasks: int, seen: float) -> float:
    """Of an image, where so many tasks see it in all rotations and the others upright."""
    return tasks + (ROTATIONS - 1) * seen


def _impossible(network: Network, tasks: int, evidence: Evidence) -> str:
    """Why there can be no cascade, or nothing."""
    if network.config.rotations == 1:
        return "this network sees no rotated image, so there is none to leave out"
    if tasks == 1:
        return "there is one task, so there is none to leave out"
    if not len(evidence):
        return "no validation image is at hand to show it by; --data says where they are"
    return ""


def _enough(tasks: int, evidence: Evidence) -> bool:
    """Whether the images could show that a cascade changes nothing: many, and of every task that may be left out."""
    if len(evidence) < ENOUGH_IMAGES:
        return False
    unseen = sorted(set(range(tasks)) - set(evidence.tasks.tolist()))
    if unseen:
        note(f"no cascade: no validation image of task {', '.join(map(str, unseen))} is at hand to show it by")
    return not unseen


def _smallest(said: Rotated, margin: float | None) -> Cascade:
    """The fewest tasks that agree as often as they must, or else all but one."""
    for candidates in range(1, len(said.tasks)):
        again = seen_again(said, candidates, margin)
        found = Cascade(
            candidates=candidates,
            margin=margin,
            seen=float(again.sum(axis=1).mean()),
            agreement=agreement(said, candidates, margin),
            images=len(again),
        )
        if _agrees(found):
            break
    return found


def _agrees(found: Cascade) -> bool:
    return found.agreement is not None and found.agreement >= AGREEMENT
