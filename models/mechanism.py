"""A mask mechanism: the layers that keep tasks apart, and its part in the training step.

A backbone asks a mechanism for its layers and does not depend on which one it is. The training loop calls the hooks of
`step_hooks` and nothing else. Mechanisms are registered by name in `models.masks`.
"""

from abc import ABC, abstractmethod
from typing import Protocol

from torch import nn

from models.config import NetworkConfig
from models.masks.step_hooks import StepHooks
from models.masks.task_layer import Connection, Selection, Units, WeightLayer
from models.masks.task_norm import TaskNorm


class LearningSettings(Protocol):
    """The settings of a training run that mechanisms read."""

    @property
    def max_sharpness(self) -> float: ...
    @property
    def sparsity_first(self) -> float: ...
    @property
    def sparsity_later(self) -> float: ...


class Mechanism(ABC):
    """Creates units and the layers between them. A mechanism has to define `layer`; the rest has defaults."""

    affine_norm = True
    """Whether each task's BatchNorm has a learned scale and shift."""

    def __init__(self, config: NetworkConfig) -> None:
        self.config = config
        self.selection = Selection()
        self.masks = nn.ModuleList()
        self.layers: list[WeightLayer] = []

    @abstractmethod
    def layer(self, connection: Connection, bias: bool) -> WeightLayer:
        """A new convolution or linear layer."""

    def new_units(self, channels: int) -> Units:
        return Units(channels)

    def layers_built(self) -> None:  # noqa: B027 (optional)
        """Called once, when all layers of the network have been created."""

    def step_hooks(self, task: int, settings: LearningSettings) -> StepHooks:
        """The hooks for learning the features of a task, which was added to the network and is not finished."""
        return StepHooks()

    # ---- called by backbones

    def units(self, channels: int) -> Units:
        units = self.new_units(channels)
        self.masks.append(units)
        return units

    def conv(self, before: Units, after: Units, kernel_size: int, stride: int, padding: int, bias: bool) -> WeightLayer:
        return self._created(Connection(before, after, 1, kernel_size, stride, padding), bias)

    def linear(self, before: Units, after: Units, inputs_per_unit: int = 1) -> WeightLayer:
        return self._created(Connection(before, after, inputs_per_unit), bias=True)

    def norm(self, after: Units) -> TaskNorm:
        return TaskNorm(after, self.selection, self.affine_norm)

    def _created(self, connection: Connection, bias: bool) -> WeightLayer:
        self.layers.append(self.layer(connection, bias))
        return self.layers[-1]
