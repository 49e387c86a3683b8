"""Adaptive evaluation: all tasks see an image upright, and only those that can still win see it turned.

Of T tasks, T + 3 k views are computed instead of 4 T. Here its answers are worked out without a graph: to choose k,
and to check the graph against.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from models.network import Network
from serving.bundle import Cascade
from serving.decision import NETWORK_NAMES, Outputs, Rule, complete, decide
from training.classifier import EVALUATION_BATCH
from training.tasks import to_device, to_unit

AGREEMENT = 0.999
"""The share of answers that may not change."""
WORTH_IT = 0.75
"""The share of all views that may be left to compute; a cascade that saves less is not worth its branches."""
ENOUGH_IMAGES = 1000
"""With fewer, not even an agreement without a fault shows that much."""


@dataclass(frozen=True)
class Rotated:
    """What a network says of a batch in each rotation: arrays [rotations, n, classes]."""

    logits: NDArray[Any]
    distances: NDArray[Any]

    def mean(self, rotations: slice = slice(None)) -> Outputs:
        """The network's outputs over some of the rotations."""
        parts = (self.logits[rotations].mean(axis=0), self.distances[rotations].mean(axis=0))
        return dict(zip(NETWORK_NAMES, parts, strict=True))


@torch.no_grad()
def rotated_outputs(network: Network, pixels: NDArray[np.uint8]) -> Rotated:
    """Every task's logits and distances in each rotation, for uint8 images [n, height, width, channels]."""
    network.eval()
    device = next(network.parameters()).device
    columns = [[_task_rotations(network, task, part) for task in range(len(network.heads))]
               for part in to_device(pixels, device).split(EVALUATION_BATCH)]  # fmt: skip
    logits, distances = (
        np.concatenate([np.concatenate([task[kind] for task in part], axis=2) for part in columns], axis=1)
        for kind in range(2)
    )
    return Rotated(logits, distances)


def _task_rotations(network: Network, task: int, pixels: torch.Tensor) -> tuple[NDArray[Any], NDArray[Any]]:
    features = network.rotated_features(to_unit(pixels), task)
    live = network.wires.after.live(task)
    logits = network.head(task).each_rotation(features)
    distances = network.distance(task).each_rotation(features[:, :, live])
    return logits.cpu().numpy(), distances.cpu().numpy()


def cascaded(said: Rotated, rule: Rule, candidates: int | None) -> Outputs:
    """The outputs where only the best tasks of each upright image see it turned."""
    full = said.mean()
    if candidates is None:
        return full
    upright = said.mean(slice(0, 1))
    foreign = complete(upright, rule)["scores"] - rule.centers
    last = np.sort(foreign, axis=1)[:, candidates - 1 : candidates]
    again = (foreign <= last)[:, rule.task_of_class]
    return {name: np.where(again, full[name], upright[name]) for name in NETWORK_NAMES}


def agreement(said: Rotated, rule: Rule, candidates: int) -> float:
    """The share of images with the same class and the same "known" as in the full evaluation."""
    full, fast = (decide(complete(outputs, rule), rule) for outputs in (said.mean(), cascaded(said, rule, candidates)))
    return float(((full.class_id == fast.class_id) & (full.known == fast.known)).mean())


def choose_cascade(network: Network, rule: Rule, pixels: NDArray[np.uint8], wanted: str) -> Cascade:
    """How many tasks see an image turned: `wanted` is on, off, or auto (on if that is shown to change nothing)."""
    tasks, off = len(rule.tasks), Cascade(candidates=None, agreement=None, images=0)
    if network.config.rotations == 1 and wanted == "on":
        raise ValueError("--cascade on: this network sees no rotated image, so there is none to leave out")
    if wanted == "off" or tasks == 1 or network.config.rotations == 1:
        return off
    if wanted == "on" and not len(pixels):
        raise ValueError("--cascade on: no validation image is at hand to show it by; --data says where they are")
    if wanted == "auto" and len(pixels) < ENOUGH_IMAGES:
        return off
    said = rotated_outputs(network, pixels)
    measured = {count: agreement(said, rule, count) for count in range(1, tasks)}
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
