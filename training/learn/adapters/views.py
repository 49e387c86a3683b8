"""The encoded views that a task's adapter learns from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from training.config import RunConfig
from training.data.image_encoder import View
from training.data.images import Images
from training.data.views import Encode, augmented_view, in_rotations

AUGMENTED = 1
"""Augmented views of each photo, besides the photo as it is."""
MOST_PER_CLASS, MOST_PER_TASK, MOST_JUDGED = 200, 4000, 400
"""Photos that an adapter learns from, and validation photos that judge it: every one is encoded several times."""

Index = NDArray[np.int64]


@dataclass(frozen=True)
class EncodedViews:
    """Photos as encoded views [n, views, rotations, dim], with their classes within the task [n]."""

    vectors: Tensor
    local_classes: Tensor
    drawn: int = 1
    """How many different views of each photo a batch has."""

    def __len__(self) -> int:
        return len(self.local_classes)

    @property
    def device(self) -> torch.device:
        return self.local_classes.device

    @property
    def place(self) -> torch.device:
        return self.vectors.device

    def in_turn(self, indices: Iterable[Tensor]) -> Iterator[Tensor]:
        """[batch, drawn, rotations, dim] of one batch after another, with views that are drawn at random."""
        views = self.vectors.shape[1]
        for index in indices:
            order = torch.rand(len(index), views).argsort(dim=1)[:, : self.drawn].to(index.device)
            yield self.vectors[index[:, None], order].to(self.device)


@dataclass(frozen=True)
class AdapterData:
    """What the adapter of one task learns from, and what judges it."""

    labels: tuple[str, ...]
    vectors: Tensor
    """Encoded views of the training photos, [n, views, rotations, dim]."""
    local_classes: Tensor
    held_out: Index
    """The validation photos, as places among all photos of the task."""
    held_out_vectors: NDArray[np.float32]
    """In every rotation, [m, rotations, dim]."""
    held_out_classes: NDArray[np.int64]
    """Within the task."""

    @property
    def classes(self) -> int:
        return len(self.labels)

    def train(self, drawn: int) -> EncodedViews:
        return EncodedViews(self.vectors, self.local_classes, drawn)

    def digest(self) -> str:
        """A checksum of everything that is learned from."""
        digest = hashlib.sha256()
        parts: list[NDArray[Any]] = [self.local_classes.cpu().numpy(), self.held_out, self.held_out_vectors]
        for part in (self.vectors.cpu().numpy(), *parts):
            digest.update(f"{part.shape}".encode())
            digest.update(np.ascontiguousarray(part).data)
        return digest.hexdigest()


def augmented_views(config: RunConfig) -> list[View]:
    """The augmented views of every training photo."""
    rotations, how = config.preset.network.rotations, config.preset.augmentation
    return [augmented_view(number, config.seed, rotations, how) for number in range(AUGMENTED)]


def learned_and_held_out(images: Images, own_validation: int, classes: int, config: RunConfig) -> tuple[Index, Index]:
    """Places of the photos that an adapter learns from, and of those that judge it.

    The last `own_validation` images are the validation split of their source, if it has one.
    """
    places = Images(np.arange(len(images)), images.labels)
    if own_validation:
        taught, judging = places.at(places.content[:-own_validation]), places.at(places.content[-own_validation:])
    else:
        taught, judging = places.split(config.preset.validation_share, config.seed)
    limit = max(1, min(MOST_PER_CLASS, MOST_PER_TASK // classes))
    return _at_most(taught, limit, config.seed), _at_most(judging, max(1, MOST_JUDGED // classes), config.seed)


def _at_most(places: Images, limit: int, seed: int) -> Index:
    """The places of each class, in ascending order, up to a maximum number per class."""
    generator = np.random.default_rng(seed)
    labels = np.unique(places.labels)
    chosen = [generator.permutation(places.content[places.labels == label])[:limit] for label in labels]
    return np.sort(np.concatenate(chosen))


def adapter_data(
    images: Images, own_validation: int, config: RunConfig, task: int, encode: Encode, device: torch.device
) -> AdapterData:
    """Encode the views of all photos of a task."""
    labels = config.tasks[task]
    taught, judging = learned_and_held_out(images, own_validation, len(labels), config)
    network = config.preset.network
    local = {label: number for number, label in enumerate(labels)}
    classes = np.array([local[str(label)] for label in images.labels])
    both = images.at(np.concatenate([taught, judging]))
    upright = in_rotations(both, network.rotations, encode, f"views of task {task}, turned")
    shape = len(taught), network.rotations, network.channels
    augmented = (
        encode(images.at(taught), view, f"views of task {task}, augmented").pixels.reshape(shape)
        for view in augmented_views(config)
    )
    return AdapterData(
        labels,
        torch.from_numpy(np.stack([upright[: len(taught)], *augmented], axis=1)),
        torch.from_numpy(classes[taught]).to(device),
        judging,
        upright[len(taught) :],
        classes[judging],
    )
