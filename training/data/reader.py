"""How a source turns originals into images: as pixels, here, or as vectors, in `training.data.encoder`."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from serving.bundle.errors import ImageError
from serving.bundle.pixels import to_pixels
from serving.bundle.sections import ImageSpec
from training.data.images import Images
from training.data.originals import Original

log = logging.getLogger(__name__)


class Unreadable(NamedTuple):
    """An image that was left out."""

    name: str
    reason: str


class Read(NamedTuple):
    """The images that could be read, in order, and those that could not."""

    images: Images
    digests: list[bytes]
    """The sha256 of what each image was read from: equal for copies."""
    unreadable: list[Unreadable]


class Reader(Protocol):
    """Reads many images."""

    def read(self, originals: Sequence[Original], labels: Sequence[str]) -> Read: ...


class PixelReader:
    """Decodes all images into one array in memory."""

    def __init__(self, spec: ImageSpec) -> None:
        self.spec = spec

    def read(self, originals: Sequence[Original], labels: Sequence[str]) -> Read:
        pixels = np.empty((len(originals), *self.spec.shape), np.uint8)
        kept: list[str] = []
        unreadable = []
        for original, label in zip(originals, labels, strict=True):
            try:
                pixels[len(kept)] = to_pixels(original.image(original.content()), self.spec)
                kept.append(label)
            except (ImageError, OSError) as error:
                unreadable.append(Unreadable(original.name, str(error)))
        images = Images(pixels[: len(kept)], np.array(kept, dtype=np.str_))
        # Of the pixels, not of the files: a run that is learned from pixels divides its images by these.
        return Read(images, [hashlib.sha256(image.tobytes()).digest() for image in images.pixels], unreadable)
