"""From a network with masks to plain modules: one for each finished task, and the whole graph over them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from models.distance import ClassDistances
from models.heads import RotationHead
from models.network import Network, rotations
from models.ranges import ActivationRanges


class BakedTask(nn.Module):
    """Everything that one task says of an image, on the channels that it uses and nothing else."""

    def __init__(
        self, body: nn.Sequential, head: RotationHead, distance: ClassDistances, ranges: ActivationRanges
    ) -> None:
        super().__init__()
        self.body = body
        self.head = head
        self.distance = distance
        self.ranges = ranges

    def forward(self, turned: Tensor) -> tuple[Tensor, Tensor]:
        """[rotations * n, channels, height, width], normalised -> logits and distances, each [n, classes]."""
        flat = self.body(turned)
        features = flat.view(len(self.head.weight), -1, flat.shape[1])
        return self.head.ensemble(features), self.distance(features)


class BakedNetwork(nn.Module):
    """Raw pixels in, every task's outputs side by side out."""

    def __init__(self, tasks: Sequence[BakedTask], mean: float, std: float) -> None:
        super().__init__()
        self.baked_tasks = tuple(tasks)
        self.mean = mean
        self.std = std

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """uint8 [n, height, width, channels] -> logits and distances, each [n, classes of all tasks]."""
        images = pixels.permute(0, 3, 1, 2).to(torch.float32) / 255
        turned = rotations((images - self.mean) / self.std, len(self.baked_tasks[0].head.weight))
        outputs = [task(turned) for task in self.baked_tasks]
        logits, distances = (torch.cat(columns, dim=1) for columns in zip(*outputs, strict=True))
        return logits, distances


@torch.no_grad()
def bake_task(network: Network, task: int) -> BakedTask:
    """The sub-network of one finished task."""
    head = network.head(task).live_part(network.wires.after.live(task))
    return BakedTask(network.baked_body(task), head, network.distance(task), network.activation_ranges(task)).eval()


def bake_tasks(network: Network) -> Iterator[BakedTask]:
    """The sub-networks of all tasks, each when it is asked for."""
    return (bake_task(network, task) for task in range(len(network.heads)))


def bake(network: Network) -> BakedNetwork:
    """The sub-networks of all tasks over one set of pixels."""
    return BakedNetwork(list(bake_tasks(network)), network.config.mean, network.config.std).eval()
