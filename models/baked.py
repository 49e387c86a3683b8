"""Plain layers for one finished task: what is left when masks have done their work.

They know nothing of tasks or gates and hold live channels only, so that an exported graph has nothing to skip.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.mechanism import Conv, Linear
from models.task_norm import TaskNorm
from models.unit_mask import Units


def bake_conv(conv: Conv, norm: TaskNorm | None, task: int) -> nn.Conv2d:
    """A smaller convolution with its normalisation folded in."""
    weight, bias = conv.live_weight(task), conv.live_bias(task)
    if norm is not None:
        scale, shift = norm.live_affine(task)
        bias = (shift if bias is None else shift + scale * bias).float()
        weight = (weight.double() * scale[:, None, None, None]).float()
    out_channels, in_channels, kernel_size, _ = weight.shape
    baked = nn.Conv2d(in_channels, out_channels, kernel_size, conv.stride, conv.padding, bias=bias is not None)
    _fill(baked, weight, bias)
    return baked


def bake_linear(linear: Linear, task: int) -> nn.Linear:
    """A smaller linear layer."""
    weight, bias = linear.live_weight(task), linear.live_bias(task)
    baked = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    _fill(baked, weight, bias)
    return baked


def _fill(layer: nn.Conv2d | nn.Linear, weight: Tensor, bias: Tensor | None) -> None:
    with torch.no_grad():
        layer.weight.copy_(weight)
        if bias is not None and layer.bias is not None:
            layer.bias.copy_(bias)


class Align(nn.Module):
    """Brings the live channels of one layer into the order and number of another's; missing ones are zero."""

    index: Tensor

    def __init__(self, before: Units, after: Units, task: int) -> None:
        super().__init__()
        position = {int(unit): place for place, unit in enumerate(before.live(task))}
        # One past the last channel: the zeros that forward appends.
        index = [position.get(int(unit), len(position)) for unit in after.live(task)]
        self.missing = len(position) in index
        self.identity = index == list(range(len(position)))
        self.register_buffer("index", torch.tensor(index))

    def forward(self, images: Tensor) -> Tensor:
        if self.identity:
            return images
        if self.missing:
            images = torch.cat([images, torch.zeros_like(images[:, :1])], dim=1)
        return images[:, self.index]
