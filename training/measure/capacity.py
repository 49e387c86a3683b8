"""Which units (HAT) or weights (Sup) each task uses, layer by layer, and how many are still free."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.masks.task_layer import Units, WeightLayer
from models.network import Network
from models.parameter_counts import capacity_used


@dataclass(frozen=True)
class LayerUsage:
    """Shares of the units or weights of a layer, between 0 and 1."""

    name: str
    size: int
    used: tuple[float, ...]
    """The share that each task uses; for Sup this is the density of its mask."""
    first_used: tuple[float, ...]
    """The share that each task was the first to use; these and `free` add up to 1."""
    shared: float
    """The share that two or more tasks use."""
    free: float
    """The share that no task uses."""


@dataclass(frozen=True)
class Capacity:
    """Every layer and the whole network; `of` is "units" or "weights"."""

    of: str
    layers: tuple[LayerUsage, ...]
    whole: LayerUsage
    frozen_weights: float | None
    """HAT: the share of the weights used at inference that no later task may change. None for Sup, whose weights never
    change."""


def capacity(network: Network) -> Capacity:
    """The usage of a network whose tasks are all finished."""
    chosen = dict(_chosen_from(network))
    tasks = range(len(network.heads))
    layers = tuple(layer_usage(name, (used.usage(task) for task in tasks)) for name, used in chosen.items())
    of = "units" if any(isinstance(used, Units) for used in chosen.values()) else "weights"
    return Capacity(of, layers, _together("whole network", layers), capacity_used(network))


def layer_usage(name: str, masks: Iterable[Tensor | None]) -> LayerUsage:
    """From the mask of each task in turn, bool [units or weights]; only one mask has to be in memory at a time."""
    used, first_used = [], []
    seen = twice = torch.zeros((), dtype=torch.bool)
    for mask in (each.cpu() for each in masks if each is not None):
        used.append(_share(mask))
        first_used.append(_share(mask & ~seen))
        twice, seen = twice | (seen & mask), seen | mask
    return LayerUsage(name, seen.numel(), tuple(used), tuple(first_used), shared=_share(twice), free=_share(~seen))


def _together(name: str, layers: Sequence[LayerUsage]) -> LayerUsage:
    """Several layers combined into one."""
    sizes = [layer.size for layer in layers]

    def mean(shares: Iterable[float]) -> float:
        return sum(size * share for size, share in zip(sizes, shares, strict=True)) / sum(sizes)

    return LayerUsage(
        name=name,
        size=sum(sizes),
        used=tuple(map(mean, zip(*(layer.used for layer in layers), strict=True))),
        first_used=tuple(map(mean, zip(*(layer.first_used for layer in layers), strict=True))),
        shared=mean(layer.shared for layer in layers),
        free=mean(layer.free for layer in layers),
    )


def _share(mask: Tensor) -> float:
    return int(mask.sum()) / mask.numel()


def _chosen_from(network: Network) -> Iterator[tuple[str, Units | WeightLayer]]:
    """The units after a layer if tasks choose among them, or else its weights. Units are named after the first layer
    before them."""
    named: set[Units] = set()
    for name, layer in network.named_modules():
        if not isinstance(layer, WeightLayer):
            continue
        units = layer.connection.after
        if units.usage(0) is None:
            yield name, layer
        elif units not in named:
            named.add(units)
            yield name, units
