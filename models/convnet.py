"""The small convolutional network for digits (AlexNet-like): wiring only."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.baked import bake_conv, bake_linear
from models.mechanism import Conv, Linear, Mechanism
from models.taps import Tap, tap
from models.task_norm import TaskNorm
from models.unit_mask import Units, Wires


def max_pooled(images: Tensor) -> Tensor:
    """The largest of each 2x2 pixels.

    On a CPU, torch takes some ten times as long to note where each came from, which only gradients ask for.
    """
    if images.requires_grad or images.device.type != "cpu":
        return functional.max_pool2d(images, 2)
    height, width = (side // 2 * 2 for side in images.shape[-2:])
    rows = torch.maximum(images[..., 0:height:2, :], images[..., 1:height:2, :])
    return torch.maximum(rows[..., 0:width:2], rows[..., 1:width:2])


class ConvStage(nn.Module):
    """Convolution, normalisation where there is one, ReLU, dropout, 2x2 max-pooling, gate; ReLU comes after pooling.

    The largest of four positive parts is the positive part of the largest, and dropout turns no sign: a quarter of
    the pixels is left to pass over, and not a bit differs. A convolution of stride 2 has no need of pooling.
    """

    def __init__(self, conv: Conv, norm: TaskNorm | None, after: Units, dropout: float, pooled: bool) -> None:
        super().__init__()
        self.conv = conv
        self.norm = norm
        self.dropout = dropout
        self.pooled = pooled
        self.wires = Wires(after, after)

    def forward(self, images: Tensor) -> Tensor:
        images = self.conv(images)
        if self.norm is not None:
            images = self.norm(images)
        images = functional.dropout(images, self.dropout, self.training)
        images = functional.relu(max_pooled(images) if self.pooled else images)
        gate = None if self.norm is not None else self.wires.after.gate()
        # A gate is never negative, so it may wait until pooling has left a quarter of the pixels.
        return images if gate is None else images * gate[:, None, None]

    def bake(self, task: int) -> nn.Module:
        pooling = [nn.MaxPool2d(2)] if self.pooled else []
        return nn.Sequential(bake_conv(self.conv, self.norm, task), nn.ReLU(), *pooling)


class HiddenStage(nn.Module):
    """Flattened feature maps to `after` units, normalisation where there is one, ReLU, dropout, gate."""

    def __init__(self, linear: Linear, norm: TaskNorm | None, after: Units, dropout: float) -> None:
        super().__init__()
        self.linear = linear
        self.norm = norm
        self.dropout = dropout
        self.wires = Wires(after, after)

    def forward(self, images: Tensor) -> Tensor:
        units = self.linear(images.flatten(1))
        if self.norm is not None:
            units = self.norm(units[:, :, None, None]).flatten(1)
        units = functional.dropout(functional.relu(units), self.dropout, self.training)
        gate = None if self.norm is not None else self.wires.after.gate()
        return units if gate is None else units * gate

    def bake(self, task: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), bake_linear(self.linear, self.norm, task), nn.ReLU())


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
    hidden_norm: bool,
    pooled: bool,
    dropout: float,
) -> tuple[nn.Sequential, Units, Tap]:
    """The body, the units of its features, and where it is tapped: before its last convolution."""
    stages: list[nn.Module] = []
    before = pixels
    sizes = _sizes(image_size, kernels, padded, pooled)
    for width, kernel in zip(channels, kernels, strict=True):
        after = make.units(width)
        conv = make.conv(before, after, kernel, 1 if pooled else 2, kernel // 2 if padded else 0, not norm)
        stages.append(ConvStage(conv, make.norm(after) if norm else None, after, dropout, pooled))
        before = after
    after = make.units(hidden)
    height, width = sizes[-1]
    linear = make.linear(before, after, height * width)
    stages.append(HiddenStage(linear, make.norm(after) if hidden_norm else None, after, dropout))
    tapped = len(channels) - 2
    return nn.Sequential(*stages), after, tap(tapped, channels[tapped], *sizes[tapped])


def _sizes(image_size: tuple[int, int], kernels: Sequence[int], padded: bool, pooled: bool) -> list[tuple[int, int]]:
    """Height and width of the feature maps after each convolution, halved by pooling or, rounded up, by a stride."""
    sizes = []
    height, width = image_size
    for kernel in kernels:
        more = (2 * (kernel // 2) if padded else 0) - kernel + (1 if pooled else 2)
        height, width = (height + more) // 2, (width + more) // 2
        sizes.append((height, width))
    if min(sizes[-1]) < 1:
        raise ValueError(f"image size {image_size} is too small for {len(kernels)} poolings")
    return sizes
