"""Adaptive evaluation: all tasks see an image upright, and only those that can still win see it turned.

Of T tasks, T + 3 k views are computed instead of 4 T. Here its answers are worked out without a graph: to choose k,
and to check the graph against.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.network import Network
from serving.bundle import Cascade
from serving.decision import NETWORK_NAMES, Outputs, complete, judge
from training.classifier import EVALUATION_BATCH
from training.decisions import Decider
from training.tasks import to_device, to_unit

AGREEMENT = 0.999
"""The share of answers that may not change."""
WORTH_IT = 0.75
"""The share of all views that may be left to compute; a cascade that saves less is not worth its branches."""
ENOUGH_IMAGES = 1000
"""With fewer, not even an agreement without a fault shows that much."""


@dataclass(frozen=True)
class Rotated:
    """What every task says of a batch in each rotation: ingredient -> [rotations, n, columns]."""

    network: Network
    decider: Decider
    tasks: list[dict[str, Tensor]]

    def mean(self, rotations: slice = slice(None)) -> Outputs:
        """The network's outputs over some of the rotations."""
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
    for task in range(len(network.heads)):
        parts = [network.said(to_unit(part), task) for part in images.split(EVALUATION_BATCH)]
        tasks.append({name: torch.cat([part[name] for part in parts], dim=1) for name in parts[0]})
    return Rotated(network, decider, tasks)


def cascaded(said: Rotated, candidates: int | None) -> Outputs:
    """The outputs where only the best tasks of each upright image see it turned."""
    full, rule = said.mean(), said.decider.rule
    if candidates is None:
        return full
    upright = said.mean(slice(0, 1))
    scores = complete(upright, rule)["scores"]
    last = np.sort(scores, axis=1)[:, candidates - 1 : candidates]
    again = (scores <= last)[:, rule.task_of_class]
    return {name: np.where(again, full[name], upright[name]) for name in NETWORK_NAMES}


def agreement(said: Rotated, candidates: int) -> float:
    """The share of images with the same class and the same "known" as in the full evaluation."""
    full, fast = (judge(outputs, said.decider.rule) for outputs in (said.mean(), cascaded(said, candidates)))
    return float(((full.class_id == fast.class_id) & (full.known == fast.known)).mean())


def choose_cascade(network: Network, decider: Decider, pixels: NDArray[np.uint8], wanted: str) -> Cascade:
    """How many tasks see an image turned: `wanted` is on, off, or auto (on if that is shown to change nothing)."""
    tasks, off = len(decider.scorers), Cascade(candidates=None, agreement=None, images=0)
    if network.config.rotations == 1 and wanted == "on":
        raise ValueError("--cascade on: this network sees no rotated image, so there is none to leave out")
    if wanted == "off" or tasks == 1 or network.config.rotations == 1:
        return off
    if wanted == "on" and not len(pixels):
        raise ValueError("--cascade on: no validation image is at hand to show it by; --data says where they are")
    if wanted == "auto" and len(pixels) < ENOUGH_IMAGES:
        return off
    said = rotated_outputs(network, decider, pixels)
    measured = {count: agreement(said, count) for count in range(1, tasks)}
    good = [count for count, share in measured.items() if share >= AGREEMENT]
    worth = good and (wanted == "on" or tasks + 3 * good[0] <= WORTH_IT * 4 * tasks)
    if worth:
        return Cascade(candidates=good[0], agreement=measured[good[0]], images=len(pixels))
    if wanted == "on":
        raise ValueError(
            f"--cascade on: at most {max(measured.values()):.2%} of {len(pixels)} validation images are answered as by "
            f"the full evaluation; needed {AGREEMENT:.1%}"
        )
    return Cascade(candidates=None, agreement=max(measured.values()), images=len(pixels))
