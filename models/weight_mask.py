"""Sup's layers: weights that are never trained, and for each task the share of them that it keeps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.task_layer import Selection, TaskLayer
from models.unit_mask import Units, Wires


class _TopShare(torch.autograd.Function):
    """Ones where |score| is among the `keep` largest; the gradient passes straight through."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, keep: int) -> Tensor:
        return top_share(scores, keep).to(scores.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def top_share(scores: Tensor, keep: int) -> Tensor:
    """Bool mask of exactly `keep` entries, the largest in magnitude."""
    flat = scores.detach().abs().flatten()
    chosen = torch.zeros_like(flat, dtype=torch.bool)
    chosen[flat.topk(keep, sorted=False).indices] = True
    return chosen.view_as(scores)


def pack_bits(mask: Tensor) -> Tensor:
    """Bool [n] -> uint8 [ceil(n / 8)], lowest bit first."""
    flat = functional.pad(mask.flatten().to(torch.uint8), (0, -mask.numel() % 8)).view(-1, 8)
    return (flat << torch.arange(8, dtype=torch.uint8, device=mask.device)).sum(dim=1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, shape: Sequence[int]) -> Tensor:
    """The bool mask that `pack_bits` was given."""
    bits = (packed[:, None] >> torch.arange(8, dtype=torch.uint8, device=packed.device)) & 1
    return bits.flatten()[: math.prod(shape)].view(*shape).bool()


class _Masked(TaskLayer):
    """Constant-magnitude weights of random sign, of which each task keeps the share `density`."""

    signs: Tensor
    scores: nn.Parameter

    def __init__(self, before: Units, after: Units, shape: tuple[int, ...], spread: int, selection: Selection) -> None:
        super().__init__()
        self.wires = Wires(before, after, spread)
        self.shape = shape
        self.selection = selection
        self.density = 1.0
        self.finished = 0
        self.register_buffer("signs", torch.randn(shape) >= 0)
        self.scores = nn.Parameter(torch.empty(0))

    @property
    def keep(self) -> int:
        return max(1, round(self.density * math.prod(self.shape)))

    @property
    def magnitude(self) -> float:
        """Kaiming's standard deviation for the weights that stay."""
        return math.sqrt(2 / (math.prod(self.shape[1:]) * self.density))

    def task_numbers(self) -> int:
        """The weights that a task keeps; what it does not keep need not be there when it answers."""
        return self.keep

    def grow(self) -> None:
        fresh = torch.empty(self.shape, device=self.signs.device)
        nn.init.kaiming_uniform_(fresh, a=math.sqrt(5))
        self.scores = nn.Parameter(fresh)

    def trainable(self, task: int) -> Iterator[nn.Parameter]:
        yield self.scores

    def finish(self, task: int) -> None:
        """Keep the mask as bits and forget the scores behind it."""
        self.register_buffer(f"mask_{task}", pack_bits(top_share(self.scores, self.keep)))
        self.scores = nn.Parameter(torch.empty(0, device=self.signs.device))
        self.finished += 1

    def mask(self, task: int) -> Tensor:
        """The bool mask of a finished task."""
        return unpack_bits(self.get_buffer(f"mask_{task}"), self.shape)

    def effective_weight(self) -> Tensor:
        """The selected task's weights: +c, -c or 0."""
        task = self.selection.task
        kept = self.mask(task).float() if task < self.finished else _TopShare.apply(self.scores, self.keep)
        return kept * torch.where(self.signs, self.magnitude, -self.magnitude)

    def live_weight(self, task: int) -> Tensor:
        return self.mask(task) * torch.where(self.signs, self.magnitude, -self.magnitude)

    def live_bias(self, task: int) -> None:
        return None


class MaskedConv2d(_Masked):
    """A convolution whose weights are chosen, not trained."""

    def __init__(
        self, before: Units, after: Units, selection: Selection, kernel_size: int, stride: int = 1, padding: int = 0
    ) -> None:
        super().__init__(before, after, (after.channels, before.channels, kernel_size, kernel_size), 1, selection)
        self.stride = stride
        self.padding = padding

    def forward(self, images: Tensor) -> Tensor:
        return functional.conv2d(images, self.effective_weight(), None, self.stride, self.padding)


class MaskedLinear(_Masked):
    """A linear layer whose weights are chosen, not trained."""

    def __init__(self, before: Units, after: Units, selection: Selection, spread: int = 1) -> None:
        super().__init__(before, after, (after.channels, before.channels * spread), spread, selection)

    def forward(self, features: Tensor) -> Tensor:
        return functional.linear(features, self.effective_weight())


def spread_density(layers: Sequence[_Masked], overall: float) -> None:
    """Share `overall` of all weights out by the Erdos-Renyi rule: small layers stay dense, large ones become sparse.

    A layer's density is proportional to (sum of its dimensions) / (product of its dimensions), at most 1; what the
    capped layers cannot take goes to the others.
    """
    sizes = [math.prod(layer.shape) for layer in layers]
    rates = [sum(layer.shape) / size for layer, size in zip(layers, sizes, strict=True)]
    dense: set[int] = set()
    while True:
        budget = overall * sum(sizes) - sum(sizes[i] for i in dense)
        sparse = [i for i in range(len(layers)) if i not in dense]
        factor = budget / sum(rates[i] * sizes[i] for i in sparse) if sparse else 0.0
        full = {i for i in sparse if factor * rates[i] >= 1}
        if not full:
            break
        dense |= full
    for i, layer in enumerate(layers):
        layer.density = 1.0 if i in dense else factor * rates[i]


def spread_links(layers: Sequence[_Masked], links: float) -> None:
    """Let each layer keep `links` weights for every unit before and after it, but no more than half of its weights."""
    for layer in layers:
        layer.density = min(0.5, links * (layer.shape[0] + layer.shape[1]) / math.prod(layer.shape))
