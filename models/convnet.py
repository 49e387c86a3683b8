"""The small convolutional network for digits (AlexNet-like): wiring only."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.baked import bake_conv, bake_linear
from models.mechanism import Conv, Linear, Mechanism
from models.task_norm import TaskNorm
from models.unit_mask import Units, Wires


class ConvStage(nn.Module):
    """Convolution, normalisation where there is one, ReLU, dropout, 2x2 max-pooling, gate; ReLU comes after pooling.

    The largest of four positive parts is the positive part of the largest, and dropout turns no sign: a quarter of
    the pixels is left to pass over, and not a bit differs.
    """

    def __init__(self, conv: Conv, norm: TaskNorm | None, after: Units, dropout: float) -> None:
        super().__init__()
        self.conv = conv
        self.norm = norm
        self.dropout = dropout
        self.wires = Wires(after, after)

    def forward(self, images: Tensor) -> Tensor:
        images = self.conv(images)
        if self.norm is not None:
            images = self.norm(images)
        images = functional.dropout(images, self.dropout, self.training)
        images = functional.relu(functional.max_pool2d(images, 2))
        gate = None if self.norm is not None else self.wires.after.gate()
        # A gate is never negative, so it may wait until pooling has left a quarter of the pixels.
        return images if gate is None else images * gate[:, None, None]

    def bake(self, task: int) -> nn.Module:
        return nn.Sequential(bake_conv(self.conv, self.norm, task), nn.ReLU(), nn.MaxPool2d(2))


class HiddenStage(nn.Module):
    """Flattened feature maps to `after` units, ReLU, dropout, gate."""

    def __init__(self, linear: Linear, after: Units, dropout: float) -> None:
        super().__init__()
        self.linear = linear
        self.dropout = dropout
        self.wires = Wires(after, after)

    def forward(self, images: Tensor) -> Tensor:
        units = functional.relu(self.linear(images.flatten(1)))
        units = functional.dropout(units, self.dropout, self.training)
        gate = self.wires.after.gate()
        return units if gate is None else units * gate

    def bake(self, task: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), bake_linear(self.linear, task), nn.ReLU())


def convnet(
    make: Mechanism,
    pixels: Units,
    image_size: tuple[int, int],
    *,
    channels: Sequence[int],
    kernels: Sequence[int],
    padded: bool,
    hidden: int,
    norm: bool,
    dropout: float,
) -> tuple[nn.Sequential, Units]:
    """The body and the units of its features."""
    stages: list[nn.Module] = []
    before = pixels
    for width, kernel in zip(channels, kernels, strict=True):
        after = make.units(width)
        conv = make.conv(before, after, kernel, 1, kernel // 2 if padded else 0, not norm)
        stages.append(ConvStage(conv, make.norm(after) if norm else None, after, dropout))
        before = after
    after = make.units(hidden)
    stages.append(HiddenStage(make.linear(before, after, _pixels_left(image_size, kernels, padded)), after, dropout))
    return nn.Sequential(*stages), after


def _pixels_left(image_size: tuple[int, int], kernels: Sequence[int], padded: bool) -> int:
    """How many positions of each channel reach the hidden layer."""
    sizes = torch.tensor(image_size)
    for kernel in kernels:
        sizes = (sizes + (2 * (kernel // 2) if padded else 0) - kernel + 1) // 2
    if int(sizes.min()) < 1:
        raise ValueError(f"image size {image_size} is too small for {len(kernels)} poolings")
    return int(sizes.prod())
