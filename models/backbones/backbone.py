"""What a backbone builder returns, the tap at which feature maps are read half-way, and the pooling at the end."""

from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import functional

from models.masks.task_layer import Units

MOST_FEATURES = 2048


class Tap(NamedTuple):
    """Reads feature maps after a stage of the body, as means over squares of `pool` x `pool` pixels."""

    stage: int
    pool: int

    def read(self, maps: Tensor) -> Tensor:
        """[n, channels, height, width] -> [n, features]."""
        return functional.avg_pool2d(maps, self.pool).flatten(1)


class Backbone(NamedTuple):
    """A body of stages, the units of its features, and its tap.

    Every stage is a module with `bake(task)`, which returns plain layers on the channels that a finished task uses.
    The stage at the tap has a `connection` whose `after` are the units of its feature maps.
    """

    body: nn.Sequential
    units: Units
    tap: Tap


class GlobalPool(nn.Module):
    """Feature maps to one number per unit."""

    def forward(self, images: Tensor) -> Tensor:
        return images.mean(dim=(2, 3))

    def bake(self, task: int) -> nn.Module:
        return GlobalPool()


def make_tap(stage: int, channels: int, height: int, width: int) -> Tap:
    """The finest tap whose number of features is small enough to estimate a covariance from a task's images."""
    pool = 1
    while channels * (height // pool) * (width // pool) > MOST_FEATURES and pool < min(height, width):
        pool += 1
    return Tap(stage, pool)
