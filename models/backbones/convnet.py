"""The small AlexNet-like convolutional network for digits."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.backbones.backbone import Backbone, GlobalPool, make_tap
from models.baked import bake_conv, bake_linear
from models.config import NetworkConfig
from models.masks.task_layer import Connection, Units, WeightLayer
from models.masks.task_norm import TaskNorm
from models.mechanism import Mechanism


def max_pooled(images: Tensor) -> Tensor:
    """2x2 max-pooling.

    On a CPU, torch's own pooling takes about ten times as long, because it records the position of every maximum. Only
    the backward pass needs these.
    """
    if images.requires_grad or images.device.type != "cpu":
        return functional.max_pool2d(images, 2)
    height, width = (side // 2 * 2 for side in images.shape[-2:])
    rows = torch.maximum(images[..., 0:height:2, :], images[..., 1:height:2, :])
    return torch.maximum(rows[..., 0:width:2], rows[..., 1:width:2])


class ConvStage(nn.Module):
    """Convolution, optional normalisation, ReLU, dropout, 2x2 max-pooling, gate.

    max(relu(x)) == relu(max(x)) and dropout keeps signs, so ReLU after pooling is exact and touches a quarter of the
    pixels. A convolution with stride 2 needs no pooling.
    """

    def __init__(self, conv: WeightLayer, norm: TaskNorm | None, after: Units, dropout: float, pooled: bool) -> None:
        super().__init__()
        self.conv = conv
        self.norm = norm
        self.dropout = dropout
        self.pooled = pooled
        self.connection = Connection(after, after)

    def forward(self, images: Tensor) -> Tensor:
        images = self.conv(images)
        if self.norm is not None:
            images = self.norm(images)
        images = functional.dropout(images, self.dropout, self.training)
        images = functional.relu(max_pooled(images) if self.pooled else images)
        gate = None if self.norm is not None else self.connection.after.gate()
        # A gate is never negative, so it can be applied after pooling, to a quarter of the pixels.
        return images if gate is None else images * gate[:, None, None]

    def bake(self, task: int) -> nn.Module:
        pooling = [nn.MaxPool2d(2)] if self.pooled else []
        return nn.Sequential(bake_conv(self.conv, self.norm, task), nn.ReLU(), *pooling)


class HiddenStage(nn.Module):
    """Flattened feature maps to `after` units, optional normalisation, ReLU, dropout, gate."""

    def __init__(self, linear: WeightLayer, norm: TaskNorm | None, after: Units, dropout: float) -> None:
        super().__init__()
        self.linear = linear
        self.norm = norm
        self.dropout = dropout
        self.connection = Connection(after, after)

    def forward(self, images: Tensor) -> Tensor:
        units = self.linear(images.flatten(1))
        if self.norm is not None:
            units = self.norm(units[:, :, None, None]).flatten(1)
        units = functional.dropout(functional.relu(units), self.dropout, self.training)
        gate = None if self.norm is not None else self.connection.after.gate()
        return units if gate is None else units * gate

    def bake(self, task: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), bake_linear(self.linear, self.norm, task), nn.ReLU())


def convnet(mechanism: Mechanism, pixels: Units, config: NetworkConfig) -> Backbone:
    """Three convolutions and a hidden layer; the tap is before the last convolution."""
    channels = (config.base, config.base * 2, config.base * 4)
    kernels = (3, 3, config.last_kernel if config.pooled else 3)
    sizes = _sizes((config.height, config.width), kernels, config.padded, config.pooled)
    stages: list[nn.Module] = []
    before = pixels
    for width, kernel, dropout in zip(channels, kernels, config.dropout[:3], strict=True):
        after = mechanism.units(width)
        stride, padding = 1 if config.pooled else 2, kernel // 2 if config.padded else 0
        conv = mechanism.conv(before, after, kernel, stride, padding, bias=not config.norm)
        norm = mechanism.norm(after) if config.norm else None
        stages.append(ConvStage(conv, norm, after, dropout, config.pooled))
        before = after
    after = mechanism.units(config.hidden)
    if config.averaged:
        stages.append(GlobalPool())
    linear = mechanism.linear(before, after, 1 if config.averaged else math.prod(sizes[-1]))
    norm = mechanism.norm(after) if config.hidden_norm else None
    stages.append(HiddenStage(linear, norm, after, config.dropout[3]))
    tapped = len(channels) - 2
    return Backbone(nn.Sequential(*stages), after, make_tap(tapped, channels[tapped], *sizes[tapped]))


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
