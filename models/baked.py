"""Plain layers for one finished task, with its masks and normalisation folded in.

They hold live channels only and have no notion of tasks or gates, so that an exported graph computes nothing in vain.
"""

from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from models.masks.task_layer import SignedMask, Units, WeightLayer
from models.masks.task_norm import TaskNorm


class Ternary(NamedTuple):
    """Weights that are +s, -s or 0, with one s per row, in the form in which they are stored."""

    signs: Tensor  # bool, the same tensor for every task of a layer
    mask: Tensor  # bool
    scale: Tensor  # [rows]


class BakedConv2d(nn.Conv2d):
    """A plain convolution; `ternary` is set if its weights are."""

    ternary: Ternary | None = None


class BakedLinear(nn.Linear):
    """A plain linear layer; `ternary` is set if its weights are."""

    ternary: Ternary | None = None


Baked = TypeVar("Baked", BakedConv2d, BakedLinear)


def bake_conv(conv: WeightLayer, norm: TaskNorm | None, task: int) -> BakedConv2d:
    """A smaller convolution with its normalisation folded in."""
    weight, bias, scale = _folded(conv, norm, task)
    out_channels, in_channels, kernel_size, _ = weight.shape
    baked = BakedConv2d(in_channels, out_channels, kernel_size, *conv.connection[4:], bias=bias is not None)
    return _filled(baked, weight, bias, conv.signed_mask(task), scale)


def bake_linear(linear: WeightLayer, norm: TaskNorm | None, task: int) -> BakedLinear:
    """A smaller linear layer with its normalisation folded in."""
    weight, bias, scale = _folded(linear, norm, task)
    baked = BakedLinear(weight.shape[1], weight.shape[0], bias=bias is not None)
    return _filled(baked, weight, bias, linear.signed_mask(task), scale)


def _folded(layer: WeightLayer, norm: TaskNorm | None, task: int) -> tuple[Tensor, Tensor | None, Tensor]:
    """Live weights and bias with the normalisation folded in, and the factor of each row."""
    weight, bias = layer.live_weight(task), layer.live_bias(task)
    scale = torch.ones(len(weight), dtype=torch.float64, device=weight.device)
    if norm is not None:
        scale, shift = norm.live_affine(task)
        bias = (shift if bias is None else shift + scale * bias).float()
        weight = (weight.double() * scale.view(-1, *[1] * (weight.dim() - 1))).float()
    return weight, bias, scale


@torch.no_grad()
def _filled(layer: Baked, weight: Tensor, bias: Tensor | None, signed: SignedMask | None, scale: Tensor) -> Baked:
    layer.weight.copy_(weight)
    if bias is not None and layer.bias is not None:
        layer.bias.copy_(bias)
    if signed is not None:
        layer.ternary = Ternary(signed.signs, signed.mask, (scale * signed.magnitude).float())
    return layer


class Align(nn.Module):
    """Maps the live channels of one layer to those of another; channels that the first does not have are zero."""

    index: Tensor

    def __init__(self, before: Units, after: Units, task: int) -> None:
        super().__init__()
        position = {int(unit): place for place, unit in enumerate(before.live(task))}
        # A missing channel gets the index one past the last, where forward appends zeros.
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
