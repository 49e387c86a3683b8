"""A body of masked layers, a projection to train it with, and one head and one unknown detector per task."""

from collections.abc import Iterator, Mapping
from typing import cast

import torch
from torch import Tensor, nn

from models.activation_ranges import ActivationRanges
from models.backbones import BACKBONES
from models.backbones.backbone import Backbone
from models.config import ROTATIONS, NetworkConfig
from models.detectors.detector import UnknownDetector
from models.detectors.score import Features
from models.heads import ProjectionHead, RotationHead
from models.masks import MECHANISMS
from models.masks.task_layer import Connection, TaskLayer, Units
from models.mechanism import Mechanism

FITTED = ("detectors.", "ranges.")
"""Tensors whose shapes are known only once a task is learned."""


class Network(nn.Module):
    """Images in [0, 1] to features, contrastive projections and logits, for one task at a time."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.config = config
        self.mechanism: Mechanism = MECHANISMS[config.method](config)
        pixels = Units(config.channels)
        backbone: Backbone = BACKBONES[config.backbone](self.mechanism, pixels, config)
        self.body, self.tap = backbone.body, backbone.tap
        # Registered, although pixels have no parameters, so that they follow the network to its device.
        self.pixels = pixels
        self.connection = Connection(pixels, backbone.units)
        self.projection = (
            ProjectionHead(self.mechanism, backbone.units, config.projection) if config.projection else None
        )
        self.mechanism.layers_built()
        self.masks = self.mechanism.masks
        self.heads = nn.ModuleList()
        self.detectors = nn.ModuleList()
        self.ranges = nn.ModuleList()

    def add_task(self, classes: int) -> int:
        """Create the state of a task with this many classes; returns the task's number."""
        for layer in self.task_layers():
            layer.grow()
        device = next(self.parameters()).device
        self.heads.append(RotationHead(self.connection.after.channels, classes, self.config.rotations).to(device))
        self.detectors.append(UnknownDetector(classes).to(device))
        self.ranges.append(ActivationRanges().to(device))
        return len(self.heads) - 1

    def finish(self, task: int) -> None:
        """Fix the masks of a task whose features are learned, and protect what it uses."""
        for layer in self.task_layers():
            layer.finish(task)

    def encode(self, images: Tensor) -> Tensor:
        """The part that is the same for all tasks: images in [0, 1] to the input of the body."""
        return (images - self.config.mean) / self.config.std

    def features(self, images: Tensor, task: int, sharpness: float | Tensor | None = None) -> Tensor:
        """[n, channels, height, width] in [0, 1] -> [n, features]; `sharpness` only while the task is learned."""
        self._select(task, sharpness)
        features: Tensor = self.body(self.encode(images))
        return features

    def project(self, images: Tensor, task: int, sharpness: float | Tensor | None = None) -> Tensor:
        """Unit vectors for the contrastive loss."""
        if self.projection is None:
            raise ValueError("a network with projection=0 has no contrastive loss")
        vectors: Tensor = self.projection(self.features(images, task, sharpness))
        return vectors

    def rotated_features(self, images: Tensor, task: int) -> Tensor:
        """[n, ...] -> [rotations, n, features] of a finished task, for each rotation of the images."""
        return self.features(self.rotated(images), task).view(self.config.rotations, len(images), -1)

    def rotated(self, images: Tensor) -> Tensor:
        """[n, ...] -> [rotations * n, ...]: the images in every rotation that the network sees."""
        return rotations(images, self.config.rotations)

    def logits(self, images: Tensor, task: int) -> Tensor:
        """A finished task's uncalibrated logits [n, classes] (the paper's f)."""
        return self.head(task).each_rotation(self.rotated_features(images, task)).mean(dim=0)

    def live_features(self, images: Tensor, task: int) -> Features:
        """The live features of a finished task at both depths, each [rotations, n, live features]."""
        self._select(task, None)
        first, rest = self.body[: self.tap.stage + 1], self.body[self.tap.stage + 1 :]
        maps: Tensor = first(self.encode(self.rotated(images)))
        at_tap = cast(Connection, first[-1].connection)
        shallow = self.tap.read(maps[:, at_tap.after.live(task)])
        deep = rest(maps)[:, self.connection.after.live(task)]
        return Features(*(flat.view(self.config.rotations, len(images), -1) for flat in (shallow, deep)))

    def measure(self, images: Tensor, task: int) -> dict[str, Tensor]:
        """A finished task's logits and the measurements of its unknown scores: name -> [rotations, n, columns]."""
        return self.measure_features(self.live_features(images, task), task)

    def measure_features(self, features: Features, task: int) -> dict[str, Tensor]:
        """The same from the task's live features."""
        head = self.head(task).live_part(self.connection.after.live(task))
        return {"logits": head.each_rotation(features.deep), **self.detector(task).measure(features)}

    def baked_body(self, task: int) -> nn.Sequential:
        """The body as plain layers on the channels that a finished task uses."""
        return nn.Sequential(*[stage.bake(task) for stage in self.body]).eval()  # type: ignore[operator]

    def detector(self, task: int) -> UnknownDetector:
        return cast(UnknownDetector, self.detectors[task])

    def activation_ranges(self, task: int) -> ActivationRanges:
        return cast(ActivationRanges, self.ranges[task])

    def head(self, task: int) -> RotationHead:
        return cast(RotationHead, self.heads[task])

    def task_layers(self) -> Iterator[TaskLayer]:
        return (module for module in self.modules() if isinstance(module, TaskLayer))

    def trainable(self, task: int) -> list[nn.Parameter]:
        """The parameters of step 1; a network without a projection trains the head together with the body."""
        body = [parameter for layer in self.task_layers() for parameter in layer.trainable(task)]
        return body if self.projection is not None else [*body, *self.head(task).parameters()]

    def load_learned(self, state: Mapping[str, Tensor]) -> None:
        """Load a state dict into a network with the same tasks.

        The shapes of what is fitted to a task's images are taken from the state. Unknown scores that the state does not
        have are removed from its tasks, and tensors of scores that are not registered are ignored.
        """
        for name, value in state.items():
            owner, _, buffer = name.rpartition(".")
            if name.startswith(FITTED) and (module := self._submodule(owner)) is not None:
                module.register_buffer(buffer, torch.empty_like(value))
        for task in range(len(self.detectors)):
            scores = self.detector(task).scores
            for score in list(scores):
                place = f"detectors.{task}.scores.{score}."
                if any(place + name not in state for name, _ in scores[score].named_buffers()):
                    del scores[score]
        ignored = {
            name for name in state if name.startswith(FITTED) and self._submodule(name.rpartition(".")[0]) is None
        }
        self.load_state_dict({name: value for name, value in state.items() if name not in ignored})

    def _submodule(self, name: str) -> nn.Module | None:
        try:
            return self.get_submodule(name)
        except AttributeError:
            return None

    def _select(self, task: int, sharpness: float | Tensor | None) -> None:
        selection = self.mechanism.selection
        selection.task, selection.sharpness = task, sharpness


def rotations(images: Tensor, count: int = ROTATIONS) -> Tensor:
    """[n, channels, height, width] -> [count * n, ...]: all images unrotated, then all by 90 degrees, and so on."""
    return torch.cat([torch.rot90(images, quarters, (2, 3)) for quarters in range(count)])
