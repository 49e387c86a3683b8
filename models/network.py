"""A body between masks, a projection to learn it with, and a head for each task."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from models.convnet import convnet
from models.detectors import Detectors
from models.heads import ROTATIONS, Projection, RotationHead
from models.mechanism import make_mechanism
from models.ranges import ActivationRanges
from models.resnet import resnet18
from models.task_layer import TaskLayer
from models.unit_mask import UnitMask, Units, Wires


@dataclass(frozen=True)
class NetworkConfig:
    """Everything that fixes a network's shape, before it knows any task."""

    method: str
    backbone: str
    height: int
    width: int
    channels: int
    mean: float
    std: float
    base: int
    hidden: int = 0
    norm: bool = True
    hidden_norm: bool = False
    """Whether the hidden layer of the convnet is normalised too."""
    padded: bool = True
    pooled: bool = True
    """Of the convnet: halve feature maps by pooling, or else, with a fraction of the work, by strides."""
    dropout: float = 0.0
    projection: int = 128
    """Dimensions of the contrastive loss; 0 for a network that is learned without it."""
    density: float = 0.32
    links: float = 0.0
    """Of Sup, instead of an overall density: a layer keeps so many weights a unit before and after it, at most half."""
    rotations: int = ROTATIONS
    """How many rotations of an image it sees: all four, or 1 where none was taught."""

    def __post_init__(self) -> None:
        if self.backbone not in BACKBONES:
            raise ValueError(f"backbone is {self.backbone!r}; allowed: {', '.join(BACKBONES)}")
        if self.std <= 0:
            raise ValueError(f"std is {self.std}; allowed: above 0")
        if self.rotations not in (1, ROTATIONS):
            raise ValueError(f"rotations is {self.rotations}; allowed: 1, {ROTATIONS}")


BACKBONES = ("convnet", "resnet18")


class Network(nn.Module):
    """Images in [0, 1] to features, contrastive projections and logits, for one task at a time."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.config = config
        make = make_mechanism(config.method, config.density, config.links)
        pixels, image_size = Units(config.channels), (config.height, config.width)
        if config.backbone == "convnet":
            self.body, units, self.tap = convnet(
                make,
                pixels,
                image_size,
                channels=(config.base, config.base * 2, config.base * 4),
                kernels=(3, 3, 2 if config.pooled else 3),
                padded=config.padded,
                hidden=config.hidden,
                norm=config.norm,
                hidden_norm=config.hidden_norm,
                pooled=config.pooled,
                dropout=config.dropout,
            )
        else:
            self.body, units, self.tap = resnet18(make, pixels, image_size, width=config.base)
        # Registered, though nothing is learned of them, so that they follow the network to its device.
        self.pixels = pixels
        self.wires = Wires(pixels, units)
        self.projection = Projection(make, units, config.projection, make.selection) if config.projection else None
        make.wired()
        self.masks = make.masks
        self.heads = nn.ModuleList()
        self.detectors = nn.ModuleList()
        self.ranges = nn.ModuleList()
        self._selection = make.selection

    def add_task(self, classes: int) -> int:
        """Make room for a task of so many classes; its number."""
        for layer in self.task_layers():
            layer.grow()
        device = next(self.parameters()).device
        self.heads.append(RotationHead(self.wires.after.channels, classes, self.config.rotations).to(device))
        self.detectors.append(Detectors(classes).to(device))
        self.ranges.append(ActivationRanges().to(device))
        return len(self.heads) - 1

    def finish(self, task: int) -> None:
        """The features of the task are learned: from now on its gates are 0 or 1 and what it uses is protected."""
        for layer in self.task_layers():
            layer.finish(task)

    def features(self, images: Tensor, task: int, sharpness: float | Tensor | None = None) -> Tensor:
        """[n, channels, height, width] in [0, 1] -> [n, features]; `sharpness` only while the task is learned."""
        self._selection.task, self._selection.sharpness = task, sharpness
        features: Tensor = self.body(self.normalised(images))
        return features

    def normalised(self, images: Tensor) -> Tensor:
        """Images in [0, 1] as the body takes them."""
        return (images - self.config.mean) / self.config.std

    def baked_body(self, task: int) -> nn.Sequential:
        """The body as plain layers on the channels that a finished task uses."""
        return nn.Sequential(*[stage.bake(task) for stage in self.body]).eval()  # type: ignore[operator]

    def project(self, images: Tensor, task: int, sharpness: float | Tensor | None = None) -> Tensor:
        """Unit vectors for the contrastive loss."""
        if self.projection is None:
            raise ValueError("a network with projection=0 has no contrastive loss")
        vectors: Tensor = self.projection(self.features(images, task, sharpness))
        return vectors

    def rotated_features(self, images: Tensor, task: int) -> Tensor:
        """[n, ...] -> [rotations, n, features]: what a finished task sees in each rotation of the images."""
        return self.features(self.turned(images), task).view(self.config.rotations, len(images), -1)

    def turned(self, images: Tensor) -> Tensor:
        """[n, ...] -> [rotations * n, ...]: the images in every rotation that the network sees."""
        return rotations(images, self.config.rotations)

    def logits(self, images: Tensor, task: int) -> Tensor:
        """A finished task's logits [n, classes] as they were learned, before any calibration (the paper's f)."""
        return self.head(task).each_rotation(self.rotated_features(images, task)).mean(dim=0)

    def rotated_depths(self, images: Tensor, task: int) -> list[Tensor]:
        """[n, ...] -> [rotations, n, live features], what a finished task sees: half-way at the tap, and at the end."""
        self._selection.task, self._selection.sharpness = task, None
        half, rest = self.body[: self.tap.stage + 1], self.body[self.tap.stage + 1 :]
        maps: Tensor = half(self.normalised(self.turned(images)))
        wires = half[-1].wires
        assert isinstance(wires, Wires)
        depths = (self.tap.of(maps[:, wires.after.live(task)]), rest(maps)[:, self.wires.after.live(task)])
        return [features.view(self.config.rotations, len(images), -1) for features in depths]

    def said(self, images: Tensor, task: int) -> dict[str, Tensor]:
        """All that a finished task says of images in each rotation, ingredient -> [rotations, n, columns]."""
        return self.said_of(self.rotated_depths(images, task), task)

    def said_of(self, depths: list[Tensor], task: int) -> dict[str, Tensor]:
        """The same from what the task sees at both depths."""
        head = self.head(task).live_part(self.wires.after.live(task))
        return {"logits": head.each_rotation(depths[-1]), **self.detector(task).each_rotation(depths)}

    def detector(self, task: int) -> Detectors:
        detector = self.detectors[task]
        assert isinstance(detector, Detectors)
        return detector

    def activation_ranges(self, task: int) -> ActivationRanges:
        ranges = self.ranges[task]
        assert isinstance(ranges, ActivationRanges)
        return ranges

    def head(self, task: int) -> RotationHead:
        head = self.heads[task]
        assert isinstance(head, RotationHead)
        return head

    def task_layers(self) -> Iterator[TaskLayer]:
        return (module for module in self.modules() if isinstance(module, TaskLayer))

    def unit_masks(self) -> list[UnitMask]:
        return [module for module in self.masks if isinstance(module, UnitMask)]

    def trainable(self, task: int) -> list[nn.Parameter]:
        """What step 1 of learning the task may change; without a projection the head learns together with the body."""
        body = [parameter for layer in self.task_layers() for parameter in layer.trainable(task)]
        return body if self.projection is not None else [*body, *self.head(task).parameters()]


def rotations(images: Tensor, count: int = ROTATIONS) -> Tensor:
    """[n, channels, height, width] -> [count * n, ...]: all images unrotated, then all by 90 degrees, and so on."""
    return torch.cat([torch.rot90(images, turn, (2, 3)) for turn in range(count)])
