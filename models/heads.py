"""What stands on the features: a classifier of rotations for each task, and the projection that learning needs."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.mechanism import Mechanism
from models.task_layer import Selection, TaskLayer
from models.unit_mask import Units, Wires

ROTATIONS = 4


class RotationHead(nn.Module):
    """One linear layer a rotation: an image turned by r * 90 degrees is scored by the r-th.

    A network that was taught no rotations has one, for upright images. `scale` and `shift` are the task's calibration.
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
        """[n, features] -> [n, rotations * classes]: class c under rotation r stands at r * classes + c."""
        logits = torch.einsum("nf,rfc->nrc", features, self.weight) + self.bias.transpose(0, 1)
        return logits.flatten(1)

    def each_rotation(self, features: Tensor) -> Tensor:
        """[rotations, n, features] -> [rotations, n, classes], the logits as they were learned (the paper's f)."""
        return torch.bmm(features, self.weight) + self.bias

    def live_part(self, live: Tensor) -> RotationHead:
        """The same head on the features that the task uses; the others are zero and say nothing."""
        part = copy.deepcopy(self)
        part.weight = nn.Parameter(self.weight.detach()[:, live])
        return part


class Projection(TaskLayer):
    """Features to the unit sphere of the contrastive loss: a hidden layer all tasks share, an output for each."""

    def __init__(self, make: Mechanism, before: Units, dimensions: int, selection: Selection) -> None:
        super().__init__()
        after = make.units(before.channels)
        self.hidden = make.linear(before, after)
        self.outputs = nn.ModuleList()
        self.wires = Wires(before, after)
        self.dimensions = dimensions
        self.selection = selection

    def grow(self) -> None:
        output = nn.Linear(self.wires.after.channels, self.dimensions)
        self.outputs.append(output.to(self.wires.after.taken.device))

    def trainable(self, task: int) -> Iterator[nn.Parameter]:
        yield from self.outputs[task].parameters()

    def forward(self, features: Tensor) -> Tensor:
        hidden = functional.relu(self.hidden(features))
        gate = self.wires.after.gate()
        output = self.outputs[self.selection.task]
        return functional.normalize(output(hidden if gate is None else hidden * gate), dim=1)
