"""Plain layers for one finished task: what is left when masks have done their work.

They know nothing of tasks or gates and hold live channels only, so that an exported graph has nothing to skip.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from models.mechanism import Conv, Linear
from models.task_norm import TaskNorm
from models.unit_mask import Units
from models.weight_mask import MaskedConv2d, MaskedLinear


class Ternary(NamedTuple):
    """Weights that are +s, -s or 0, s constant in each row: what there is to store of them."""

    signs: Tensor  # bool, the layer's own tensor, the same for every task
    mask: Tensor  # bool
    scale: Tensor  # [rows]


class BakedConv2d(nn.Conv2d):
    """A plain convolution that may know its weights to be ternary."""

    ternary: Ternary | None = None


class BakedLinear(nn.Linear):
    """A plain linear layer that may know its weights to be ternary."""

    ternary: Ternary | None = None


def bake_conv(conv: Conv, norm: TaskNorm | None, task: int) -> BakedConv2d:
    """A smaller convolution with its normalisation folded in."""
    weight, bias, scale = _folded(conv, norm, task)
    out_channels, in_channels, kernel_size, _ = weight.shape
    baked = BakedConv2d(in_channels, out_channels, kernel_size, conv.stride, conv.padding, bias=bias is not None)
    _fill(baked, weight, bias)
    baked.ternary = _ternary(conv, task, scale)
    return baked


def bake_linear(linear: Linear, norm: TaskNorm | None, task: int) -> BakedLinear:
    """A smaller linear layer with its normalisation folded in."""
    weight, bias, scale = _folded(linear, norm, task)
    baked = BakedLinear(weight.shape[1], weight.shape[0], bias=bias is not None)
    _fill(baked, weight, bias)
    baked.ternary = _ternary(linear, task, scale)
    return baked


def _folded(layer: Conv | Linear, norm: TaskNorm | None, task: int) -> tuple[Tensor, Tensor | None, Tensor]:
    """Live weights and bias with the normalisation folded in, and what it multiplied each row by."""
    weight, bias = layer.live_weight(task), layer.live_bias(task)
    scale = torch.ones(len(weight), dtype=torch.float64, device=weight.device)
    if norm is not None:
        scale, shift = norm.live_affine(task)
        bias = (shift if bias is None else shift + scale * bias).float()
        weight = (weight.double() * scale.view(-1, *[1] * (weight.dim() - 1))).float()
    return weight, bias, scale


def _fill(layer: nn.Conv2d | nn.Linear, weight: Tensor, bias: Tensor | None) -> None:
    with torch.no_grad():
        layer.weight.copy_(weight)
        if bias is not None and layer.bias is not None:
            layer.bias.copy_(bias)


def _ternary(layer: Conv | Linear, task: int, scale: Tensor) -> Ternary | None:
    if isinstance(layer, MaskedConv2d | MaskedLinear):
        return Ternary(layer.signs, layer.mask(task), (scale * layer.magnitude).float())
    return None


class Align(nn.Module):
    """Brings the live channels of one layer into the order and number of another's; missing ones are zero."""

    index: Tensor

    def __init__(self, before: Units, after: Units, task: int) -> None:
        super().__init__()
        position = {int(unit): place for place, unit in enumerate(before.live(task))}
        # One past the last channel: the zeros that forward appends.
        index = [position.get(int(unit), len(position)) for unit in after.live(task)]
        self.channels = len(position)
        self.missing = len(position) in index
        self.identity = index == list(range(len(position)))
        self.register_buffer("index", torch.tensor(index))

    def forward(self, images: Tensor) -> Tensor:
        if self.identity:
            return images
        if self.missing:
            images = torch.cat([images, torch.zeros_like(images[:, :1])], dim=1)
        return images[:, self.index]
