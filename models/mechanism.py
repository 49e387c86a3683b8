"""The two ways to keep tasks apart. A backbone asks one of them for its layers and knows neither."""

from __future__ import annotations

from typing import Protocol

from torch import nn

from models.gated import GatedConv2d, GatedLinear
from models.task_layer import Selection
from models.task_norm import TaskNorm
from models.unit_mask import UnitMask, Units
from models.weight_mask import MaskedConv2d, MaskedLinear, spread_density, spread_links

Conv = GatedConv2d | MaskedConv2d
Linear = GatedLinear | MaskedLinear


class Mechanism(Protocol):
    """Hands out units and the layers between them."""

    selection: Selection
    masks: nn.ModuleList

    def units(self, channels: int) -> Units: ...
    def conv(self, before: Units, after: Units, kernel_size: int, stride: int, padding: int, bias: bool) -> Conv: ...
    def linear(self, before: Units, after: Units, spread: int = 1) -> Linear: ...
    def norm(self, after: Units) -> TaskNorm: ...
    def wired(self) -> None:
        """Called once, when every layer has been handed out."""


class Hat:
    """Gates on units; weights between two taken units never change again."""

    def __init__(self) -> None:
        self.selection = Selection()
        self.masks = nn.ModuleList()

    def units(self, channels: int) -> UnitMask:
        mask = UnitMask(channels, self.selection)
        self.masks.append(mask)
        return mask

    def conv(self, before: Units, after: Units, kernel_size: int, stride: int, padding: int, bias: bool) -> GatedConv2d:
        return GatedConv2d(before, after, kernel_size, stride, padding, bias)

    def linear(self, before: Units, after: Units, spread: int = 1) -> GatedLinear:
        return GatedLinear(before, after, spread)

    def norm(self, after: Units) -> TaskNorm:
        return TaskNorm(after, self.selection, affine=True)

    def wired(self) -> None:
        """Gates need nothing more."""


class Sup:
    """Masks on weights that never change at all; units are open to every task."""

    def __init__(self, density: float, links: float = 0.0) -> None:
        if not 0 < density <= 1:
            raise ValueError(f"density is {density}; allowed: above 0 and up to 1, such as 0.32")
        self.selection = Selection()
        self.masks = nn.ModuleList()
        self.density = density
        self.links = links
        self._layers: list[MaskedConv2d | MaskedLinear] = []

    def units(self, channels: int) -> Units:
        units = Units(channels)
        self.masks.append(units)
        return units

    def conv(
        self, before: Units, after: Units, kernel_size: int, stride: int, padding: int, bias: bool
    ) -> MaskedConv2d:
        layer = MaskedConv2d(before, after, self.selection, kernel_size, stride, padding)
        self._layers.append(layer)
        return layer

    def linear(self, before: Units, after: Units, spread: int = 1) -> MaskedLinear:
        layer = MaskedLinear(before, after, self.selection, spread)
        self._layers.append(layer)
        return layer

    def norm(self, after: Units) -> TaskNorm:
        return TaskNorm(after, self.selection, affine=False)

    def wired(self) -> None:
        if self.links:
            spread_links(self._layers, self.links)
        else:
            spread_density(self._layers, self.density)


def make_mechanism(method: str, density: float = 0.32, links: float = 0.0) -> Mechanism:
    """`hat` or `sup`."""
    if method == "hat":
        return Hat()
    if method == "sup":
        return Sup(density, links)
    raise ValueError(f"method is {method!r}; allowed: hat, sup")
