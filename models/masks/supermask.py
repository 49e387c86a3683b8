"""Sup: weights are never trained; each task selects the share of them that it keeps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.config import NetworkConfig
from models.masks.task_layer import Connection, Selection, SignedMask, WeightLayer
from models.mechanism import Mechanism

MOST_DENSE = 0.5
"""The largest share of its weights that a layer keeps: a layer that keeps all of them has nothing to choose."""


class _TopShare(torch.autograd.Function):
    """Ones where a magnitude is among the `keep` largest; the gradient passes straight through to the magnitudes."""

    @staticmethod
    def forward(ctx: Any, magnitudes: Tensor, keep: int) -> Tensor:
        return top_share(magnitudes, keep).to(magnitudes.dtype)

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
    """The inverse of `pack_bits`: a bool mask of this shape."""
    bits = (packed[:, None] >> torch.arange(8, dtype=torch.uint8, device=packed.device)) & 1
    return bits.flatten()[: math.prod(shape)].view(*shape).bool()


class MaskedLayer(WeightLayer):
    """Weights of constant magnitude and random sign, of which each task keeps the share `density`."""

    signs: Tensor
    scores: nn.Parameter

    def __init__(self, connection: Connection, selection: Selection) -> None:
        super().__init__(connection)
        self.selection = selection
        self.density = 1.0
        self.finished = 0
        self.register_buffer("signs", torch.randn(self.shape) >= 0)
        self.scores = nn.Parameter(torch.empty(0))

    @property
    def keep(self) -> int:
        return max(1, round(self.density * math.prod(self.shape)))

    @property
    def magnitude(self) -> float:
        """Kaiming's standard deviation for the weights that are kept."""
        return math.sqrt(2 / (math.prod(self.shape[1:]) * self.density))

    def task_numbers(self) -> int:
        """The weights that a task keeps; the others are not needed at inference."""
        return self.keep

    def grow(self) -> None:
        fresh = torch.empty(self.shape, device=self.signs.device)
        nn.init.kaiming_uniform_(fresh, a=math.sqrt(5))
        self.scores = nn.Parameter(fresh)

    def trainable(self, task: int) -> Iterator[nn.Parameter]:
        yield self.scores

    def finish(self, task: int) -> None:
        """Store the mask as bits and drop the scores that it was made from."""
        self.register_buffer(f"mask_{task}", pack_bits(top_share(self.scores, self.keep)))
        self.scores = nn.Parameter(torch.empty(0, device=self.signs.device))
        self.finished += 1

    def mask(self, task: int) -> Tensor:
        """The bool mask of a finished task."""
        return unpack_bits(self.get_buffer(f"mask_{task}"), self.shape)

    def effective_weight(self) -> Tensor:
        """The selected task's weights: +c, -c or 0."""
        task = self.selection.task
        # The absolute value is outside the straight-through function, so that the gradient carries the score's sign: a
        # weight that should be kept gets a larger magnitude, whether its score is positive or negative.
        kept = self.mask(task).float() if task < self.finished else _TopShare.apply(self.scores.abs(), self.keep)
        return kept * torch.where(self.signs, self.magnitude, -self.magnitude)

    def live_weight(self, task: int) -> Tensor:
        return self.mask(task) * torch.where(self.signs, self.magnitude, -self.magnitude)

    def usage(self, task: int) -> Tensor:
        return self.mask(task).flatten()

    def signed_mask(self, task: int) -> SignedMask:
        return SignedMask(self.signs, self.mask(task), self.magnitude)


class Sup(Mechanism):
    """Supermasks in superposition (Wortsman et al., 2020): masks on weights; units are open to every task."""

    affine_norm = False

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__(config)
        if not 0 < config.density <= MOST_DENSE:
            raise ValueError(f"density is {config.density}; allowed: above 0 and up to {MOST_DENSE}, such as 0.32")

    def layer(self, connection: Connection, bias: bool) -> MaskedLayer:
        return MaskedLayer(connection, self.selection)

    def layers_built(self) -> None:
        layers = [layer for layer in self.layers if isinstance(layer, MaskedLayer)]
        if self.config.links:
            spread_links(layers, self.config.links)
        else:
            spread_density(layers, self.config.density)


def spread_density(layers: Sequence[MaskedLayer], overall: float) -> None:
    """Distribute the share `overall` of all weights by the Erdos-Renyi rule: dense small layers, sparse large ones.

    A layer's density is proportional to (sum of its dimensions) / (product of its dimensions), at most MOST_DENSE; what
    the capped layers cannot take goes to the others.
    """
    sizes = [math.prod(layer.shape) for layer in layers]
    rates = [sum(layer.shape) / size for layer, size in zip(layers, sizes, strict=True)]
    capped: set[int] = set()
    while True:
        budget = overall * sum(sizes) - MOST_DENSE * sum(sizes[i] for i in capped)
        others = [i for i in range(len(layers)) if i not in capped]
        factor = budget / sum(rates[i] * sizes[i] for i in others) if others else 0.0
        full = {i for i in others if factor * rates[i] >= MOST_DENSE}
        if not full:
            break
        capped |= full
    for i, layer in enumerate(layers):
        layer.density = MOST_DENSE if i in capped else factor * rates[i]


def spread_links(layers: Sequence[MaskedLayer], links: float) -> None:
    """Let each layer keep `links` weights per unit before and after it, but at most MOST_DENSE of its weights."""
    for layer in layers:
        layer.density = min(MOST_DENSE, links * (layer.shape[0] + layer.shape[1]) / math.prod(layer.shape))
