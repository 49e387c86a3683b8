"""How full a network is: which units (HAT) or weights (Sup) each task uses, layer by layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.counting import capacity_used
from models.gated import GatedConv2d, GatedLinear
from models.network import Network
from models.unit_mask import UnitMask
from models.weight_mask import MaskedConv2d, MaskedLinear


@dataclass(frozen=True)
class LayerUse:
    """Shares of a layer's units or weights, between 0 and 1."""

    name: str
    size: int
    used: tuple[float, ...]
    """By each task: for Sup, how dense its mask is."""
    first_used: tuple[float, ...]
    """By each task before any other; with `free` these are the whole layer."""
    shared: float
    """By two tasks or more."""
    free: float
    """By none."""


@dataclass(frozen=True)
class Capacity:
    """Every layer and the whole network; `of` says what is counted."""

    of: str
    layers: tuple[LayerUse, ...]
    whole: LayerUse
    frozen_weights: float | None
    """HAT: the share of the weights that answer which no later task may change. Sup never changes a weight."""


def capacity(network: Network) -> Capacity:
    """Of a network whose tasks are all finished."""
    tasks = range(len(network.heads))
    gated = network.config.method == "hat"
    layers = tuple(layer_use(name, masks) for name, masks in (_gates if gated else _weight_masks)(network, tasks))
    return Capacity("units" if gated else "weights", layers, _together("whole network", layers), capacity_used(network))


def layer_use(name: str, masks: Iterable[Tensor]) -> LayerUse:
    """From what each task in turn uses, bool [units or weights]: only one of them has to be in memory."""
    used, first_used = [], []
    seen = twice = torch.zeros((), dtype=torch.bool)
    for mask in masks:
        used.append(_share(mask))
        first_used.append(_share(mask & ~seen))
        twice, seen = twice | (seen & mask), seen | mask
    return LayerUse(name, seen.numel(), tuple(used), tuple(first_used), shared=_share(twice), free=_share(~seen))


def _together(name: str, layers: Sequence[LayerUse]) -> LayerUse:
    """Several layers as one."""
    sizes = [layer.size for layer in layers]

    def mean(shares: Iterable[float]) -> float:
        return sum(size * share for size, share in zip(sizes, shares, strict=True)) / sum(sizes)

    return LayerUse(
        name=name,
        size=sum(sizes),
        used=tuple(map(mean, zip(*(layer.used for layer in layers), strict=True))),
        first_used=tuple(map(mean, zip(*(layer.first_used for layer in layers), strict=True))),
        shared=mean(layer.shared for layer in layers),
        free=mean(layer.free for layer in layers),
    )


def _share(mask: Tensor) -> float:
    return int(mask.sum()) / mask.numel()


def _gates(network: Network, tasks: Sequence[int]) -> Iterator[tuple[str, Iterator[Tensor]]]:
    """Each mask of units, by the name of the first layer before it."""
    named: set[int] = set()
    for name, layer in network.named_modules():
        if isinstance(layer, GatedConv2d | GatedLinear) and id(layer.wires.after) not in named:
            mask = layer.wires.after
            assert isinstance(mask, UnitMask)
            named.add(id(mask))
            yield name, (logits.detach().cpu() > 0 for logits in (mask.logits[task] for task in tasks))


def _weight_masks(network: Network, tasks: Sequence[int]) -> Iterator[tuple[str, Iterator[Tensor]]]:
    for name, layer in network.named_modules():
        if isinstance(layer, MaskedConv2d | MaskedLinear):
            yield name, (mask.flatten().cpu() for mask in map(layer.mask, tasks))
