"""ResNet-18 for small images, at any width: wiring only."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.baked import Align, BakedConv2d, bake_conv
from models.mechanism import Conv, Mechanism
from models.taps import Tap, tap
from models.task_norm import TaskNorm
from models.unit_mask import Units, Wires

TAPPED_STAGE = 2


class Stem(nn.Module):
    """The first convolution, at full resolution."""

    def __init__(self, make: Mechanism, before: Units, after: Units) -> None:
        super().__init__()
        self.conv = make.conv(before, after, 3, 1, 1, bias=False)
        self.norm = make.norm(after)

    def forward(self, images: Tensor) -> Tensor:
        return functional.relu(self.norm(self.conv(images)))

    def bake(self, task: int) -> nn.Module:
        return nn.Sequential(bake_conv(self.conv, self.norm, task), nn.ReLU())


class ResidualBlock(nn.Module):
    """Two convolutions and a shortcut, with a gate after the first and one after the sum."""

    def __init__(self, make: Mechanism, before: Units, after: Units, stride: int) -> None:
        super().__init__()
        inner = make.units(after.channels)
        self.first = make.conv(before, inner, 3, stride, 1, bias=False)
        self.first_norm = make.norm(inner)
        self.second = make.conv(inner, after, 3, 1, 1, bias=False)
        self.second_norm = make.norm(after)
        self.shortcut: Conv | None = None
        self.shortcut_norm: TaskNorm | None = None
        if stride != 1 or before.channels != after.channels:
            self.shortcut = make.conv(before, after, 1, stride, 0, bias=False)
            self.shortcut_norm = make.norm(after)
        self.wires = Wires(before, after)

    def forward(self, images: Tensor) -> Tensor:
        residual = functional.relu(self.first_norm(self.first(images)))
        residual = self.second_norm(self.second(residual))
        if self.shortcut is not None and self.shortcut_norm is not None:
            return functional.relu(residual + self.shortcut_norm(self.shortcut(images)))
        gate = self.wires.after.gate()
        # The norms have gated their own outputs; an identity has no norm to do so.
        summed = residual + images if gate is None else torch.addcmul(residual, images, gate[:, None, None])
        return functional.relu(summed)

    def bake(self, task: int) -> nn.Module:
        shortcut: nn.Module = Align(self.wires.before, self.wires.after, task)
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


class GlobalPool(nn.Module):
    """Feature maps to one number a unit."""

    def forward(self, images: Tensor) -> Tensor:
        return images.mean(dim=(2, 3))

    def bake(self, task: int) -> nn.Module:
        return GlobalPool()


def resnet18(
    make: Mechanism, pixels: Units, image_size: tuple[int, int], *, width: int
) -> tuple[nn.Sequential, Units, Tap]:
    """The body, the units of its features (8 * width), and where it is tapped: at the end of stage 3 of 4."""
    before: Units = make.units(width)
    blocks: list[nn.Module] = [Stem(make, pixels, before)]
    for stage in range(4):
        for position in range(2):
            after = make.units(width * 2**stage)
            blocks.append(ResidualBlock(make, before, after, 2 if stage > 0 and position == 0 else 1))
            before = after
        if stage == TAPPED_STAGE:
            # A convolution of stride 2 and padding 1 rounds up.
            tapped = tap(len(blocks) - 1, before.channels, *(-(-side // 2**stage) for side in image_size))
    return nn.Sequential(*blocks, GlobalPool()), before, tapped
