"""The layers on top of the features: one classification head per task, and the projection for the contrastive loss."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.config import ROTATIONS
from models.masks.task_layer import Connection, TaskLayer, Units
from models.mechanism import Mechanism


class RotationHead(nn.Module):
    """One linear layer per rotation: an image rotated by r * 90 degrees is classified by the r-th.

    A network that was trained without rotations has one layer, for upright images. `scale` and `shift` are the task's
    calibration.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, features: int, classes: int, rotations: int = ROTATIONS) -> None:
        super().__init__()
        self.classes = classes
        self.weight = nn.Parameter(torch.empty(rotations, features, classes))
        self.bias = nn.Parameter(torch.zeros(rotations, 1, classes))
        nn.init.normal_(self.weight, std=0.01)
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("shift", torch.zeros(()))

    def all_logits(self, features: Tensor) -> Tensor:
        """[n, features] -> [n, rotations * classes]: class c under rotation r has column r * classes + c."""
        logits = torch.einsum("nf,rfc->nrc", features, self.weight) + self.bias.transpose(0, 1)
        return logits.flatten(1)

    def each_rotation(self, features: Tensor) -> Tensor:
        """[rotations, n, features] -> [rotations, n, classes], uncalibrated logits (the paper's f)."""
        return torch.bmm(features, self.weight) + self.bias

    def live_part(self, live: Tensor) -> RotationHead:
        """The same head on the live features only; all other features are zero."""
        part = copy.deepcopy(self)
        part.weight = nn.Parameter(self.weight.detach()[:, live])
        return part


class ProjectionHead(TaskLayer):
    """Features to the unit sphere of the contrastive loss: a shared hidden layer and one output layer per task."""

    def __init__(self, mechanism: Mechanism, before: Units, dimensions: int) -> None:
        super().__init__()
        after = mechanism.units(before.channels)
        self.hidden = mechanism.linear(before, after)
        self.outputs = nn.ModuleList()
        self.connection = Connection(before, after)
        self.dimensions = dimensions
        self.selection = mechanism.selection

    def grow(self) -> None:
        output = nn.Linear(self.connection.after.channels, self.dimensions)
        self.outputs.append(output.to(self.connection.after.used.device))

    def trainable(self, task: int) -> Iterator[nn.Parameter]:
        yield from self.outputs[task].parameters()

    def forward(self, features: Tensor) -> Tensor:
        hidden = functional.relu(self.hidden(features))
        gate = self.connection.after.gate()
        output = self.outputs[self.selection.task]
        return functional.normalize(output(hidden if gate is None else hidden * gate), dim=1)
