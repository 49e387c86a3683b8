"""Where a body's feature maps are looked at half-way."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.nn import functional

MOST_FEATURES = 2048


class Tap(NamedTuple):
    """After which stage of the body, and how large the squares are whose mean is taken."""

    stage: int
    pool: int

    def of(self, maps: Tensor) -> Tensor:
        """[n, channels, height, width] -> [n, features]."""
        return functional.avg_pool2d(maps, self.pool).flatten(1)


def tap(stage: int, channels: int, height: int, width: int) -> Tap:
    """As fine as it can be with a number of features whose covariance a task's images can tell."""
    pool = 1
    while channels * (height // pool) * (width // pool) > MOST_FEATURES and pool < min(height, width):
        pool += 1
    return Tap(stage, pool)
