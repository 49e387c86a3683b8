"""HAT's layers: built between two masks, so that protection and pruning follow from the wiring."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.task_layer import TaskLayer
from models.unit_mask import Units, Wires


class _Gated(TaskLayer):
    """Weights between the units before and the units after; each unit before covers `spread` inputs."""

    weight: nn.Parameter

    def __init__(self, before: Units, after: Units, shape: tuple[int, ...], spread: int, bias: bool) -> None:
        super().__init__()
        self.wires = Wires(before, after, spread)
        self.weight = nn.Parameter(torch.empty(shape))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        self.bias = nn.Parameter(torch.zeros(shape[0])) if bias else None

    def trainable(self, task: int) -> Iterator[nn.Parameter]:
        yield self.weight
        if self.bias is not None:
            yield self.bias

    def frozen(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Weights that join two taken units, biases of taken units (the paper's min(a_i, a_j))."""
        inputs = self.wires.before.taken.repeat_interleave(self.wires.spread)
        joined = self.wires.after.taken[:, None] & inputs[None, :]
        yield self.weight, joined.reshape(*joined.shape, *[1] * (self.weight.dim() - 2)).expand_as(self.weight)
        if self.bias is not None:
            yield self.bias, self.wires.after.taken

    def shared_numbers(self) -> int:
        return self.weight.numel() + (0 if self.bias is None else self.bias.numel())

    def live_weight(self, task: int) -> Tensor:
        """The weights between the units that a finished task uses."""
        return self.wires.live_part(self.weight.detach(), task)

    def live_bias(self, task: int) -> Tensor | None:
        return None if self.bias is None else self.bias.detach()[self.wires.after.live(task)].clone()


class GatedConv2d(_Gated):
    """A convolution between two masks."""

    def __init__(
        self, before: Units, after: Units, kernel_size: int, stride: int = 1, padding: int = 0, bias: bool = False
    ) -> None:
        super().__init__(before, after, (after.channels, before.channels, kernel_size, kernel_size), 1, bias)
        self.stride = stride
        self.padding = padding

    def forward(self, images: Tensor) -> Tensor:
        return functional.conv2d(images, self.weight, self.bias, self.stride, self.padding)


class GatedLinear(_Gated):
    """A linear layer between two masks."""

    def __init__(self, before: Units, after: Units, spread: int = 1, bias: bool = True) -> None:
        super().__init__(before, after, (after.channels, before.channels * spread), spread, bias)

    def forward(self, features: Tensor) -> Tensor:
        return functional.linear(features, self.weight, self.bias)
