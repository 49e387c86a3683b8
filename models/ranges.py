"""How large a task's activations become on its own images: what whole-number arithmetic must know beforehand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from models.baked import BakedConv2d
from models.resnet import BakedResidualBlock


def measured_layers(body: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The layers of a baked body whose outputs are measured, by name and in order."""
    for name, layer in body.named_modules():
        if isinstance(layer, BakedConv2d | BakedResidualBlock):
            yield name, layer


class ActivationRanges(nn.Module):
    """The smallest and the largest output of each convolution and each residual sum of one task's baked body.

    Recorded once, on the task's own training images, when the task is learned: two numbers a layer, no image. So a
    bundle of whole numbers can be made at any later time, when those images are gone.
    """

    bounds: Tensor  # [layers, 2]

    def __init__(self, layers: int = 0) -> None:
        super().__init__()
        self.register_buffer("bounds", torch.zeros(layers, 2))

    @torch.no_grad()
    def record(self, body: nn.Module, batches: Iterable[Tensor]) -> None:
        """Run normalised images through a baked body and remember the extremes."""
        layers = list(measured_layers(body))
        bounds = torch.tensor([[torch.inf, -torch.inf]]).repeat(len(layers), 1)

        def watch(place: int) -> torch.utils.hooks.RemovableHandle:
            def note(_: nn.Module, __: object, output: Tensor) -> None:
                bounds[place, 0] = torch.minimum(bounds[place, 0], output.min().cpu())
                bounds[place, 1] = torch.maximum(bounds[place, 1], output.max().cpu())

            return layers[place][1].register_forward_hook(note)

        hooks = [watch(place) for place in range(len(layers))]
        try:
            for images in batches:
                body(images)
        finally:
            for hook in hooks:
                hook.remove()
        self.bounds = bounds.to(self.bounds.device)

    def of(self, body: nn.Module) -> dict[str, tuple[float, float]]:
        """Layer name -> smallest and largest output."""
        names = [name for name, _ in measured_layers(body)]
        return {name: (float(low), float(high)) for name, (low, high) in zip(names, self.bounds.tolist(), strict=True)}
