"""ResNet-18 for small images, at any width."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.backbones.backbone import Backbone, GlobalPool, make_tap
from models.baked import Align, BakedConv2d, bake_conv
from models.config import NetworkConfig
from models.masks.task_layer import Connection, Units, WeightLayer
from models.masks.task_norm import TaskNorm
from models.mechanism import Mechanism

TAPPED_STAGE = 2


class Stem(nn.Module):
    """The first convolution, at full resolution."""

    def __init__(self, mechanism: Mechanism, before: Units, after: Units) -> None:
        super().__init__()
        self.conv = mechanism.conv(before, after, 3, 1, 1, bias=False)
        self.norm = mechanism.norm(after)

    def forward(self, images: Tensor) -> Tensor:
        return functional.relu(self.norm(self.conv(images)))

    def bake(self, task: int) -> nn.Module:
        return nn.Sequential(bake_conv(self.conv, self.norm, task), nn.ReLU())


class ResidualBlock(nn.Module):
    """Two convolutions and a shortcut, with a gate after the first and one after the sum."""

    def __init__(self, mechanism: Mechanism, before: Units, after: Units, stride: int) -> None:
        super().__init__()
        inner = mechanism.units(after.channels)
        self.first = mechanism.conv(before, inner, 3, stride, 1, bias=False)
        self.first_norm = mechanism.norm(inner)
        self.second = mechanism.conv(inner, after, 3, 1, 1, bias=False)
        self.second_norm = mechanism.norm(after)
        self.shortcut: WeightLayer | None = None
        self.shortcut_norm: TaskNorm | None = None
        if stride != 1 or before.channels != after.channels:
            self.shortcut = mechanism.conv(before, after, 1, stride, 0, bias=False)
            self.shortcut_norm = mechanism.norm(after)
        self.connection = Connection(before, after)

    def forward(self, images: Tensor) -> Tensor:
        residual = functional.relu(self.first_norm(self.first(images)))
        residual = self.second_norm(self.second(residual))
        if self.shortcut is not None and self.shortcut_norm is not None:
            return functional.relu(residual + self.shortcut_norm(self.shortcut(images)))
        gate = self.connection.after.gate()
        # Norms gate their own outputs; an identity shortcut has no norm and is gated here.
        summed = residual + images if gate is None else torch.addcmul(residual, images, gate[:, None, None])
        return functional.relu(summed)

    def bake(self, task: int) -> nn.Module:
        shortcut: nn.Module = Align(self.connection.before, self.connection.after, task)
        if self.shortcut is not None:
            shortcut = bake_conv(self.shortcut, self.shortcut_norm, task)
        return BakedResidualBlock(
            bake_conv(self.first, self.first_norm, task), bake_conv(self.second, self.second_norm, task), shortcut
        )


class BakedResidualBlock(nn.Module):
    """A residual block of plain convolutions on live channels."""

    def __init__(self, first: BakedConv2d, second: BakedConv2d, shortcut: nn.Module) -> None:
        super().__init__()
        self.first = first
        self.second = second
        self.shortcut = shortcut

    def forward(self, images: Tensor) -> Tensor:
        residual = self.second(functional.relu(self.first(images)))
        return functional.relu(residual + self.shortcut(images))


def resnet18(mechanism: Mechanism, pixels: Units, config: NetworkConfig) -> Backbone:
    """Four stages of two blocks, 8 * base features; the tap is at the end of the third stage."""
    before: Units = mechanism.units(config.base)
    blocks: list[nn.Module] = [Stem(mechanism, pixels, before)]
    for stage in range(4):
        for position in range(2):
            after = mechanism.units(config.base * 2**stage)
            blocks.append(ResidualBlock(mechanism, before, after, 2 if stage > 0 and position == 0 else 1))
            before = after
        if stage == TAPPED_STAGE:
            # A convolution with stride 2 and padding 1 rounds up.
            sides = (-(-side // 2**stage) for side in (config.height, config.width))
            tap = make_tap(len(blocks) - 1, before.channels, *sides)
    return Backbone(nn.Sequential(*blocks, GlobalPool()), before, tap)
