"""From a network with masks to plain modules, one task at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from models.detectors import Detectors
from models.heads import RotationHead
from models.network import Network
from models.ranges import ActivationRanges
from models.scores import TaskScorer
from models.taps import Tap


@dataclass(frozen=True)
class BakedTask:
    """Everything that one task says of an image, on the channels that it uses and nothing else."""

    body: nn.Sequential
    tap: Tap
    head: RotationHead
    detectors: Detectors
    ranges: ActivationRanges
    scorer: TaskScorer


@torch.no_grad()
def bake_task(network: Network, scorers: Sequence[TaskScorer], task: int) -> BakedTask:
    """The sub-network of one finished task."""
    head = network.head(task).live_part(network.wires.after.live(task))
    ranges = network.activation_ranges(task)
    body = network.baked_body(task).eval()
    return BakedTask(body, network.tap, head, network.detector(task), ranges, scorers[task])
