"""Where images come from, by name. Every source ends as 8-bit pixels of the preset's size, with a label for each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from serving.bundle import ImageSpec
from serving.preprocess import to_pixels
from training.class_folders import class_folders, subfolders
from training.images import TEST_SHARE, DataError, Images, Source
from training.published import OWN_NAMES, PUBLISHED, published, tiny_imagenet

SPLIT_SEED = 0
"""What is held out for testing depends on neither seed nor method, so that runs can be compared."""


def kind_of(dataset: str, data: str | None) -> str:
    """What lies at `data`, for a preset of a data set: that data set, or anyone's class folders.

    A folder is a place for data sets if it is empty or holds one, be it another than the one that is wanted.
    """
    if data is None:
        return dataset
    if dataset not in NEEDS_PLACE:
        return "folder"
    is_place = any((Path(data) / name).exists() for name in OWN_NAMES) or not subfolders(Path(data))
    return dataset if is_place else "folder"


def load_source(name: str, spec: ImageSpec, data: str | None) -> Source:
    """A named data set, or `folder` for class folders under `data`."""
    if name not in SOURCES:
        raise DataError(f"dataset is {name!r}; allowed: {', '.join(SOURCES)}")
    return SOURCES[name](spec, data)


def _digits(spec: ImageSpec, data: str | None) -> Source:
    """scikit-learn's 1,797 handwritten digits, which come with the package."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    grey = (bunch.images * (255 / 16)).round().astype(np.uint8)
    pixels = np.stack([to_pixels(Image.fromarray(image), spec) for image in grey])
    images = Images(pixels, bunch.target.astype(str))
    train, test = images.split(TEST_SHARE, SPLIT_SEED)
    return Source(train, test, tuple(map(str, range(10))))


SOURCES: dict[str, Callable[[ImageSpec, str | None], Source]] = {
    "digits": _digits,
    **{name: partial(published, which) for name, which in PUBLISHED.items()},
    "tinyimagenet": tiny_imagenet,
    "folder": class_folders,
}

NEEDS_PLACE = (*PUBLISHED, "tinyimagenet")
"""The data sets that lie, or shall lie, in a folder."""
