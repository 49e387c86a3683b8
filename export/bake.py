"""From a network with masks to plain modules: one for each finished task, and the whole graph over them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from models.detectors import Detectors
from models.heads import RotationHead
from models.network import Network, rotations
from models.ranges import ActivationRanges
from models.scores import TaskScorer
from models.taps import Tap


class BakedTask(nn.Module):
    """Everything that one task says of an image, on the channels that it uses and nothing else."""

    def __init__(
        self,
        body: nn.Sequential,
        tap: Tap,
        head: RotationHead,
        detectors: Detectors,
        ranges: ActivationRanges,
        scorer: TaskScorer,
    ) -> None:
        super().__init__()
        self.body = body
        self.tap = tap
        self.head = head
        self.detectors = detectors
        self.ranges = ranges
        self.scorer = scorer

    def forward(self, turned: Tensor) -> tuple[Tensor, Tensor]:
        """[rotations * n, channels, height, width], normalised -> logits and distances, each [n, classes]."""
        maps = self.body[: self.tap.stage + 1](turned)
        features = self.body[self.tap.stage + 1 :](maps)
        depths = [flat.view(len(self.head.weight), -1, flat.shape[1]) for flat in (self.tap.of(maps), features)]
        rotated = {"logits": self.head.each_rotation(depths[-1]), **self.detectors.each_rotation(depths)}
        said = self.detectors.together(rotated)
        return self.scorer.logits(said), self.scorer.distances(said)


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
def bake_task(network: Network, scorers: Sequence[TaskScorer], task: int) -> BakedTask:
    """The sub-network of one finished task."""
    head = network.head(task).live_part(network.wires.after.live(task))
    ranges = network.activation_ranges(task)
    body = network.baked_body(task)
    return BakedTask(body, network.tap, head, network.detector(task), ranges, scorers[task]).eval()


def bake(network: Network, scorers: Sequence[TaskScorer]) -> BakedNetwork:
    """The sub-networks of all tasks over one set of pixels."""
    tasks = [bake_task(network, scorers, task) for task in range(len(network.heads))]
    return BakedNetwork(tasks, network.config.mean, network.config.std).eval()
