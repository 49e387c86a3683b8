"""Two masked layers for the vectors of a frozen trunk, which are images of one pixel with a channel per number."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from models.backbones.backbone import Backbone, GlobalPool, make_tap
from models.baked import bake_conv
from models.config import NetworkConfig
from models.masks.task_layer import Connection, Units
from models.mechanism import Mechanism


class InputNorm(nn.Module):
    """Standardises the numbers of a vector, for each task by its own photos: depths of a trunk differ in size."""

    def __init__(self, mechanism: Mechanism, encoded: Units) -> None:
        super().__init__()
        self.norm = mechanism.norm(encoded)

    def forward(self, encoded: Tensor) -> Tensor:
        standardised: Tensor = self.norm(encoded)
        return standardised

    def bake(self, task: int) -> nn.Module:
        return BakedNorm(*self.norm.live_affine(task))


class BakedNorm(nn.Module):
    """Every channel times a factor, plus an offset."""

    factors: Tensor
    offsets: Tensor

    def __init__(self, factors: Tensor, offsets: Tensor) -> None:
        super().__init__()
        self.register_buffer("factors", factors.float())
        self.register_buffer("offsets", offsets.float())

    def forward(self, encoded: Tensor) -> Tensor:
        return encoded * self.factors[:, None, None] + self.offsets[:, None, None]


class AdapterStage(nn.Module):
    """A masked linear layer on every pixel, normalisation with the gate folded in, ReLU."""

    def __init__(self, mechanism: Mechanism, before: Units, after: Units) -> None:
        super().__init__()
        self.linear = mechanism.conv(before, after, 1, stride=1, padding=0, bias=False)
        self.norm = mechanism.norm(after)
        self.connection = Connection(before, after)

    def forward(self, encoded: Tensor) -> Tensor:
        return functional.relu(self.norm(self.linear(encoded)))

    def bake(self, task: int) -> nn.Module:
        return nn.Sequential(bake_conv(self.linear, self.norm, task), nn.ReLU())


def adapter(mechanism: Mechanism, encoded: Units, config: NetworkConfig) -> Backbone:
    """[n, channels, 1, 1] -> [n, base]; the tap is after the first layer. Of larger images, pixels are averaged."""
    first, second = mechanism.units(config.base), mechanism.units(config.base)
    layers = AdapterStage(mechanism, encoded, first), AdapterStage(mechanism, first, second)
    stages = InputNorm(mechanism, encoded), *layers, GlobalPool()
    return Backbone(nn.Sequential(*stages), second, make_tap(1, config.base, config.height, config.width))
