"""What a task remembers of its own images, to tell them from all others: distances at two depths, and a memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from models.distance import ClassDistances
from models.mixtures import ClassMixtures
from models.residual import PrincipalResidual
from models.scores import INGREDIENTS, Said


class Detectors(nn.Module):
    """Fitted once, on the task's own training images, when the task is learned; numbers, no image.

    `memory` is what the task's network says of the task's own validation images: [ingredients, n, classes]. `turned` is
    what it says of them when they are turned, which CSI teaches it to take for images of no class.
    """

    memory: Tensor
    turned: Tensor

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes = classes
        self.tied = ClassDistances(classes)
        self.shallow = ClassMixtures(classes)
        self.deep = ClassMixtures(classes)
        self.background = ClassDistances(1)
        self.residual = PrincipalResidual()
        self.register_buffer("memory", torch.zeros(len(INGREDIENTS), 0, classes))
        self.register_buffer("turned", torch.zeros(len(INGREDIENTS), 0, classes))

    def fit(self, depths: Sequence[Tensor], local_classes: Tensor, largest_logit: float) -> None:
        """[4, n, features] of the training images at both depths, and their classes [n]."""
        shallow, deep = depths
        self.tied.fit(deep, local_classes)
        self.shallow.fit(shallow, local_classes)
        self.deep.fit(deep, local_classes)
        self.background.fit(deep, torch.zeros_like(local_classes))
        self.residual.fit(deep, largest_logit)

    def each_rotation(self, depths: Sequence[Tensor]) -> dict[str, Tensor]:
        """[4, n, features] at both depths -> every ingredient but the logits, [4, n, columns]."""
        shallow, deep = depths
        return {
            "tied": self.tied.each_rotation(deep),
            "shallow": self.shallow.each_rotation(shallow),
            "deep": self.deep.each_rotation(deep),
            "background": self.background.each_rotation(deep),
            "residual": self.residual.each_rotation(deep),
        }

    def together(self, rotated: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Some rotations of every ingredient, [rotations, n, columns] -> what a decision reads, [n, classes]."""
        said = {name: values.mean(dim=0) for name, values in rotated.items()}
        for name, mixtures in (("shallow", self.shallow), ("deep", self.deep)):
            said[name] = mixtures.nearest(said[name])
        return {name: values.expand(-1, self.classes) for name, values in said.items()}

    def remember(self, said: Said, turned: Said) -> None:
        """Keep what the network says of the validation images, upright and turned."""
        self.memory, self.turned = (torch.stack([each[name] for name in INGREDIENTS]) for each in (said, turned))

    def remembered(self) -> dict[str, Tensor]:
        """Of the validation images: ingredient -> [n, classes]."""
        return dict(zip(INGREDIENTS, self.memory, strict=True))

    def remembered_turned(self) -> dict[str, Tensor]:
        """Of the same images, turned."""
        return dict(zip(INGREDIENTS, self.turned, strict=True))
