"""From a network with masks to plain modules, one task at a time."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from models.activation_ranges import ActivationRanges
from models.backbones.backbone import Tap
from models.detectors.detector import UnknownDetector
from models.detectors.task_scorer import TaskScorer
from models.heads import RotationHead
from models.network import Network


@dataclass(frozen=True)
class BakedTask:
    """Everything that computes one task's outputs, on the channels that the task uses."""

    body: nn.Sequential
    tap: Tap
    head: RotationHead
    detector: UnknownDetector
    ranges: ActivationRanges
    scorer: TaskScorer
    shallow_features: int
    """The number of features at the tap."""


@torch.no_grad()
def bake_task(network: Network, scorers: Sequence[TaskScorer], task: int) -> BakedTask:
    """The sub-network of one finished task."""
    head = network.head(task).live_part(network.connection.after.live(task))
    ranges = network.activation_ranges(task)
    body, config = network.baked_body(task), network.config
    image = torch.zeros(1, config.channels, config.height, config.width, device=head.weight.device)
    shallow = network.tap.read(body[: network.tap.stage + 1](image)).shape[1]
    return BakedTask(body, network.tap, head, network.detector(task), ranges, scorers[task], shallow)
