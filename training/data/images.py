"""Images with labels: what every data source returns and every task uses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

LEAST_TAUGHT, LEAST_TESTED = 2, 1
"""Images that each class needs: one to train, one to validate and one to test."""
TEST_SHARE = 0.25
"""Share of test images where the data has no split of its own."""


class DataError(Exception):
    """Images that cannot be learned from; the message says which, and what is allowed."""


@dataclass(frozen=True)
class Images:
    """`pixels[i]`, uint8 [height, width, channels], shows `labels[i]`."""

    pixels: NDArray[np.uint8]
    labels: NDArray[np.str_]

    def __len__(self) -> int:
        return len(self.labels)

    def of(self, labels: Iterable[str]) -> Images:
        return self.at(np.isin(self.labels, list(labels)).nonzero()[0])

    def at(self, index: NDArray[np.integer]) -> Images:
        return Images(self.pixels[index], self.labels[index])

    def split(self, share: float, seed: int) -> tuple[Images, Images]:
        """Two parts: most images of each class, and `share` of each class; at least one image of it on either side."""
        generator = np.random.default_rng(seed)
        kept, taken = [], []
        for label in np.unique(self.labels):
            index = generator.permutation((self.labels == label).nonzero()[0])
            if len(index) < 2:
                raise DataError(f"class {str(label)!r} has {len(index)} image; at least 2 are needed to hold some out")
            count = min(max(1, round(share * len(index))), len(index) - 1)
            taken.append(index[:count])
            kept.append(index[count:])
        return self.at(np.sort(np.concatenate(kept))), self.at(np.sort(np.concatenate(taken)))


@dataclass(frozen=True)
class Source:
    """Training and test images, and the classes in the order in which tasks are made of them."""

    train: Images
    test: Images
    classes: tuple[str, ...]
    validation: Images | None = None
    """If the source has a validation split; else a share of the training images is held out."""
    never_taught: tuple[str, ...] = ()
    """Classes with test images only, which are always unknown."""


def picture(pixels: NDArray[np.uint8]) -> Image.Image:
    """Pixels [height, width, channels] as a grey or colour image."""
    return Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)


def join(parts: Sequence[Images]) -> Images:
    """All images in one object, in order."""
    return Images(np.concatenate([part.pixels for part in parts]), np.concatenate([part.labels for part in parts]))
