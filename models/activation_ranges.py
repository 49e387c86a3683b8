"""The range of a task's activations on its own images, which int8 quantisation needs."""

from collections.abc import Iterable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from models.backbones.resnet import BakedResidualBlock
from models.baked import BakedConv2d


def measured_layers(body: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Names and modules of a baked body whose outputs are measured, in order."""
    for name, layer in body.named_modules():
        if isinstance(layer, BakedConv2d | BakedResidualBlock):
            yield name, layer


class ActivationRanges(nn.Module):
    """The smallest and the largest output of each convolution and each residual sum of one task's baked body.

    Recorded once, on the task's training images, when the task is learned: two numbers per layer, no image. So an int8
    bundle can be exported at any later time, when those images are gone.
    """

    bounds: Tensor  # [layers, 2]

    def __init__(self, layers: int = 0) -> None:
        super().__init__()
        self.register_buffer("bounds", torch.zeros(layers, 2))

    @torch.no_grad()
    def record(self, body: nn.Module, batches: Iterable[Tensor]) -> None:
        """Run encoded images through a baked body and store the extremes of its activations."""
        layers = [layer for _, layer in measured_layers(body)]
        bounds = torch.tensor([[torch.inf, -torch.inf]]).repeat(len(layers), 1)

        def record_extremes(bound: Tensor, _: nn.Module, __: object, output: Tensor) -> None:
            bound[0] = torch.minimum(bound[0], output.min().cpu())
            bound[1] = torch.maximum(bound[1], output.max().cpu())

        hooks = [
            layer.register_forward_hook(partial(record_extremes, bound))
            for layer, bound in zip(layers, bounds, strict=True)
        ]
        try:
            for images in batches:
                body(images)
        finally:
            for hook in hooks:
                hook.remove()
        self.bounds = bounds.to(self.bounds.device)

    def by_layer(self, body: nn.Module) -> dict[str, tuple[float, float]]:
        """Layer name -> smallest and largest output."""
        names = [name for name, _ in measured_layers(body)]
        return {name: (float(low), float(high)) for name, (low, high) in zip(names, self.bounds.tolist(), strict=True)}
