"""Data sets by name. Each is loaded as 8-bit pixels in the size of the preset, with one label per image."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from models.suggest import unknown_name
from serving.bundle.sections import ImageSpec
from training.data.class_folders import class_folders, subfolders
from training.data.downloads import OWN_NAMES, PUBLISHED, published, tiny_imagenet
from training.data.images import TEST_SHARE, DataError, Source
from training.data.originals import array_originals
from training.data.reader import PixelReader, Reader

FOLDER = "folder"
"""Class folders of the user."""
SPLIT_SEED = 0
"""The test images depend on neither seed nor method, so that runs can be compared."""


def kind_of(dataset: str, data: str | None) -> str:
    """The kind of data at `data` for a preset of a data set: that data set, or "folder" for class folders.

    An empty folder, or one that holds any published data set, is a place for data sets.
    """
    if data is None:
        return dataset
    if dataset not in NEEDS_PLACE:
        return FOLDER
    is_place = any((Path(data) / name).exists() for name in OWN_NAMES) or not subfolders(Path(data))
    return dataset if is_place else FOLDER


def load_source(name: str, spec: ImageSpec, data: str | None, encoder: Reader | None = None) -> Source:
    """A named data set, or `folder` for class folders under `data`: as pixels of `spec`, or encoded by an encoder."""
    if name not in SOURCES:
        raise DataError(unknown_name("dataset", name, SOURCES))
    return SOURCES[name](encoder or PixelReader(spec), data)


def _digits(reader: Reader, data: str | None) -> Source:
    """scikit-learn's 1,797 handwritten digits, which come with the package."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    grey = (bunch.images * (255 / 16)).round().astype(np.uint8)
    images = reader.read(array_originals("digits", grey), bunch.target.astype(str)).images
    train, test = images.split(TEST_SHARE, SPLIT_SEED)
    return Source(train, test, tuple(map(str, range(10))))


SOURCES: dict[str, Callable[[Reader, str | None], Source]] = {
    "digits": _digits,
    **{name: partial(published, which) for name, which in PUBLISHED.items()},
    "tinyimagenet": tiny_imagenet,
    FOLDER: class_folders,
}

NEEDS_PLACE = (*PUBLISHED, "tinyimagenet")
"""The data sets that are read from, or downloaded to, a folder."""
