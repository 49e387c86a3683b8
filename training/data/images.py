"""Images with labels: what every data source returns and every task uses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

LEAST_TAUGHT, LEAST_TESTED = 2, 1
"""Images that each class needs: one to train, one to validate and one to test."""
TEST_SHARE = 0.25
"""Share of test images where the data has no split of its own."""
CHUNK = 1024
"""Encoded images that are read at a time."""


class DataError(Exception):
    """Images that cannot be learned from; the message has their names, and what is allowed."""


@dataclass(frozen=True)
class Images:
    """Images as pixels, or as vectors that a trunk encoded; the i-th shows `labels[i]`."""

    content: NDArray[Any]
    """Pixels, uint8 [n, height, width, channels], or all vectors of the cache, float32 [m, dim], memory-mapped."""
    labels: NDArray[np.str_]
    rows: NDArray[np.int64] | None = None
    """Encoded: the row of each image in `content`."""
    originals: NDArray[np.object_] | None = None
    """Encoded: the `training.data.originals.Original` of each image, from which its pixels can be read again."""

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def encoded(self) -> bool:
        return self.rows is not None

    @property
    def pixels(self) -> NDArray[Any]:
        """uint8 [n, height, width, channels]; of encoded images float32 [n, dim], read from the cache on each use."""
        return self.content if self.rows is None else self.content[self.rows]

    def chunks(self, size: int = CHUNK) -> Iterator[NDArray[Any]]:
        """`pixels` in parts of up to `size` images, for more images than fit into memory at once."""
        for start in range(0, len(self), size):
            stop = start + size
            yield self.content[start:stop] if self.rows is None else self.content[self.rows[start:stop]]

    def of(self, labels: Iterable[str]) -> Images:
        return self.at(np.isin(self.labels, list(labels)).nonzero()[0])

    def at(self, index: NDArray[np.integer]) -> Images:
        if self.rows is None or self.originals is None:
            return Images(self.content[index], self.labels[index])
        return Images(self.content, self.labels[index], self.rows[index], self.originals[index])

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
    labels = np.concatenate([part.labels for part in parts])
    if any(part.rows is None for part in parts):
        return Images(np.concatenate([part.content for part in parts]), labels)
    # Maps of the same file differ in length if it grew in between; the longest has the rows of all of them.
    content = max((part.content for part in parts), key=len)
    rows = np.concatenate([part.rows for part in parts if part.rows is not None])
    originals = np.concatenate([part.originals for part in parts if part.originals is not None])
    return Images(content, labels, rows, originals)
