"""How full a network is: which units (HAT) or weights (Sup) each task uses, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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
    """HAT: the share of all weights that no later task may change. Sup never changes a weight."""


def capacity(network: Network) -> Capacity:
    """Of a network whose tasks are all finished."""
    tasks = range(len(network.heads))
    gated = network.config.method == "hat"
    masks = list(_gates(network, tasks) if gated else _weight_masks(network, tasks))
    layers = tuple(layer_use(name, mask) for name, mask in masks)
    whole = layer_use("whole network", torch.cat([mask for _, mask in masks], dim=1))
    return Capacity("units" if gated else "weights", layers, whole, _frozen_share(network) if gated else None)


def layer_use(name: str, masks: Tensor) -> LayerUse:
    """From what each task uses, bool [tasks, units or weights]."""
    users = masks.sum(dim=0)
    before = (masks.cumsum(dim=0) - masks.int()) > 0
    return LayerUse(
        name=name,
        size=masks.shape[1],
        used=_means(masks),
        first_used=_means(masks & ~before),
        shared=float((users > 1).double().mean()),
        free=float((users == 0).double().mean()),
    )


def _means(masks: Tensor) -> tuple[float, ...]:
    return tuple(masks.double().mean(dim=1).tolist())


def _gates(network: Network, tasks: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
    """Each mask of units, by the name of the first layer before it."""
    named: set[int] = set()
    for name, layer in network.named_modules():
        if isinstance(layer, GatedConv2d | GatedLinear) and id(layer.wires.after) not in named:
            mask = layer.wires.after
            assert isinstance(mask, UnitMask)
            named.add(id(mask))
            yield name, torch.stack([mask.logits[task].detach() > 0 for task in tasks]).cpu()


def _weight_masks(network: Network, tasks: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
    for name, layer in network.named_modules():
        if isinstance(layer, MaskedConv2d | MaskedLinear):
            yield name, torch.stack([layer.mask(task).flatten() for task in tasks]).cpu()


def _frozen_share(network: Network) -> float:
    parts = [frozen for layer in network.task_layers() for _, frozen in layer.frozen()]
    return sum(int(part.sum()) for part in parts) / sum(part.numel() for part in parts)
