"""What every layer with task-specific state has in common, and the selection of the task that is computed."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass
class Selection:
    """The task that a network computes; one object, shared by all its layers.

    `sharpness` is that of soft masks while the task is being learned. None means a finished task: its masks are
    exactly 0 or 1. A compiled network takes the sharpness as a tensor.
    """

    task: int = 0
    sharpness: float | Tensor | None = None


class TaskLayer(nn.Module):
    """A layer with state of its own for each task. Tasks are added one at a time, in order."""

    def grow(self) -> None:
        """Create the state of the next task."""

    def trainable(self, task: int) -> Iterator[nn.Parameter]:
        """The parameters that learning this task may change."""
        yield from ()

    def frozen(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Shared parameters, each with a bool mask of the entries that finished tasks depend on."""
        yield from ()

    def shared_numbers(self) -> int:
        """How many numbers of this layer all tasks share."""
        return 0

    def task_numbers(self) -> int:
        """How many numbers of this layer each task needs for itself at inference."""
        return 0

    def finish(self, task: int) -> None:
        """Fix what the task uses, once its features are learned.

        A checkpoint is loaded into a network whose tasks were finished in this way: all tensors that belong to a
        finished task must exist afterwards, with their final shapes.
        """


class Units(TaskLayer):
    """`channels` units that are open to every task: input pixels, or any layer of a network without gates."""

    used: Tensor
    """Bool [channels]: the units that finished tasks use."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels
        self.register_buffer("used", torch.ones(channels, dtype=torch.bool), persistent=False)

    def gate(self) -> Tensor | None:
        """Gate values of the selected task [channels]; None if every unit is open."""
        return None

    def live(self, task: int) -> Tensor:
        """Indices of the units that a finished task uses."""
        return torch.arange(self.channels, device=self.used.device)

    def usage(self, task: int) -> Tensor | None:
        """Bool [channels]: the units that a finished task uses; None if units are open to every task."""
        return None


class Connection(NamedTuple):
    """A layer of weights between two layers of units: a convolution, or a linear layer if `kernel_size` is 0.

    A plain tuple, so that units between two layers are not registered twice as submodules.
    """

    before: Units
    after: Units
    inputs_per_unit: int = 1
    """Inputs that each unit before a linear layer provides."""
    kernel_size: int = 0
    stride: int = 1
    padding: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weights: [after, before * inputs_per_unit] or [after, before, kernel_size, kernel_size]."""
        sides = [self.kernel_size] * 2 if self.kernel_size else []
        return self.after.channels, self.before.channels * self.inputs_per_unit, *sides

    def live_weights(self, weight: Tensor, task: int) -> Tensor:
        """The rows and columns of [after, before * inputs_per_unit, ...] weights that a finished task uses."""
        inputs = self.before.live(task)[:, None] * self.inputs_per_unit
        inputs = (inputs + torch.arange(self.inputs_per_unit, device=inputs.device)).flatten()
        return weight[self.after.live(task)][:, inputs].clone()


class SignedMask(NamedTuple):
    """Weights of which each is +magnitude, -magnitude or 0."""

    signs: Tensor
    mask: Tensor
    magnitude: float


class WeightLayer(TaskLayer):
    """A convolution or a linear layer."""

    bias: nn.Parameter | None

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self.connection = connection
        self.shape = connection.shape
        self.register_parameter("bias", None)

    def effective_weight(self) -> Tensor:
        """The weights with which the selected task computes."""
        raise NotImplementedError

    def live_weight(self, task: int) -> Tensor:
        """The weights between the live units of a finished task."""
        raise NotImplementedError

    def live_bias(self, task: int) -> Tensor | None:
        return None if self.bias is None else self.bias.detach()[self.connection.after.live(task)].clone()

    def usage(self, task: int) -> Tensor:
        """Bool [weights]: the weights that a finished task uses, if its units are open to every task."""
        return torch.ones(math.prod(self.shape), dtype=torch.bool)

    def signed_mask(self, task: int) -> SignedMask | None:
        """The weights of a finished task as bits, if they are such; None otherwise."""
        return None

    def forward(self, inputs: Tensor) -> Tensor:
        weight = self.effective_weight()
        if weight.dim() == 2:
            return functional.linear(inputs, weight, self.bias)
        return functional.conv2d(inputs, weight, self.bias, self.connection.stride, self.connection.padding)
