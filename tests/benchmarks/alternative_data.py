"""What the learners of `tests.benchmarks.alternatives` learn: MNIST in five tasks, or the default's digits in four."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from serving.bundle.sections import ImageSpec
from training.data.datasets import load_source
from training.data.images import Images

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Setting:
    """A data set with its tasks, and the network and the buffer of our preset for it."""

    dataset: str
    title: str
    side: int
    tasks: tuple[tuple[int, ...], ...]
    """The classes of each task; they follow each other."""
    hidden: int
    """Units of the network's last layer but one."""
    padded: bool
    """Whether its convolutions are padded."""
    buffer: int
    """Images that a strategy may store."""
    epochs: int
    choice: tuple[int, int]
    """Training images per class by which the optimiser is chosen: to learn from, and others to measure on."""
    choice_epochs: int

    @property
    def classes(self) -> int:
        """How many classes are learned: 0, 1, ..."""
        return self.tasks[-1][-1] + 1

    @property
    def image(self) -> ImageSpec:
        return ImageSpec(height=self.side, width=self.side, mode="L")


SETTINGS: Mapping[str, Setting] = {
    setting.dataset: setting
    for setting in (
        Setting(
            dataset="mnist",
            title="MNIST, five tasks",
            side=28,
            tasks=((0, 1), (2, 3), (4, 5), (6, 7), (8, 9)),
            hidden=512,
            padded=False,
            buffer=200,
            epochs=3,
            choice=(1000, 600),
            choice_epochs=1,
        ),
        Setting(
            dataset="digits",
            title="scikit-learn's digits, four tasks",
            side=16,
            tasks=((0, 1), (2, 3), (4, 5), (6, 7)),
            hidden=128,
            padded=True,
            buffer=160,
            epochs=20,
            choice=(80, 30),
            choice_epochs=20,
        ),
    )
}


class Digits(Dataset[tuple[Tensor, int]]):
    """Images [n, 1, side, side] and class ids, in the form that Avalanche's benchmarks want."""

    def __init__(self, images: Tensor, class_ids: Ids) -> None:
        self.images, self.targets = images, class_ids.tolist()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        return self.images[place], self.targets[place]


class Data(NamedTuple):
    """Images [n, 1, side, side] of the learned classes as the network reads them, and their class ids [n]."""

    train: Digits
    test: Tensor
    class_ids: Ids
    foreign: dict[str, Tensor]
    """Images of no learned class, by what they are."""


def read(setting: Setting, data: str | None, unknown: str | None) -> Data:
    """`unknown` is a folder of other images; classes of the data set that no task has are foreign too."""
    source = load_source(setting.dataset, setting.image, data)
    train, test = ((pixels_of(images), ids_of(images)) for images in (source.train, source.test))
    foreign = {}
    if unknown is not None:
        foreign["foreign"] = pixels_of(load_source("folder", setting.image, unknown).test)
    if (never := test[1] >= setting.classes).any():
        foreign[named(np.unique(test[1][never]).tolist())] = test[0][never]
    kept, learned = ~never, train[1] < setting.classes
    return Data(Digits(train[0][learned], train[1][learned]), test[0][kept], test[1][kept], foreign)


def part_for_choices(setting: Setting, data: Data) -> Data:
    """A part of the training images, cut in two: to learn from, and to measure which optimiser is better."""
    ids = np.array(data.train.targets, np.int64)
    places = [np.flatnonzero(ids == each) for each in range(setting.classes)]
    for_learning, for_measuring = setting.choice
    cuts = slice(for_learning), slice(-for_measuring, None)
    learned, measured = (np.concatenate([each[cut] for each in places]) for cut in cuts)
    train = Digits(data.train.images[learned], ids[learned])
    return Data(train, data.train.images[measured], ids[measured], {})


def pixels_of(images: Images) -> Tensor:
    """The scale of our presets for digits: mean 0, standard deviation 0.5 of values from 0 to 1."""
    pixels = np.asarray(images.pixels, np.float32).reshape(len(images), 1, *images.pixels.shape[1:3])
    return torch.from_numpy(pixels / 255 / 0.5)


def ids_of(images: Images) -> Ids:
    return np.array([int(label) for label in images.labels], np.int64)


def named(classes: list[int]) -> str:
    return ", ".join(map(str, classes))
