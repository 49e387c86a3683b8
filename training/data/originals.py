"""Where the pixels of an image come from, so that they can be read whenever they are needed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from serving.bundle.pixels import Limits, open_image

PHOTOS = Limits(size=1 << 30, pixels=175_000_000, side=1 << 16, memory=700_000_000)
"""Training images are trusted: photographs of any size, up to what Pillow calls a decompression bomb."""


class Original(Protocol):
    """An image that can be read again."""

    @property
    def name(self) -> str:
        """For messages."""
        ...

    def stamp(self) -> bytes | None:
        """32 bytes that change whenever the content changes, without reading it; None if there are none."""
        ...

    def content(self) -> bytes:
        """What identifies the image; raises OSError if it cannot be read."""
        ...

    def image(self, content: bytes) -> Image.Image:
        """The image, not yet decoded if that can wait; raises an ImageError."""
        ...


@dataclass(frozen=True, slots=True)
class FileOriginal:
    """An image file."""

    path: Path

    @property
    def name(self) -> str:
        return str(self.path)

    def stamp(self) -> bytes | None:
        state = self.path.stat()
        text = f"{self.path}\0{state.st_size}\0{state.st_mtime_ns}\0{state.st_ctime_ns}\0{state.st_ino}\0{state.st_dev}"
        return hashlib.sha256(text.encode(errors="surrogateescape")).digest()

    def content(self) -> bytes:
        return self.path.read_bytes()

    def image(self, content: bytes) -> Image.Image:
        return open_image(content, PHOTOS)


@dataclass(frozen=True, slots=True)
class ArrayOriginal:
    """An image of a data set that is in memory: uint8 [height, width] or [height, width, channels]."""

    name: str
    pixels: NDArray[np.uint8]

    def stamp(self) -> bytes | None:
        return None

    def content(self) -> bytes:
        return repr(self.pixels.shape).encode() + self.pixels.tobytes()

    def image(self, content: bytes) -> Image.Image:
        return Image.fromarray(self.pixels)


def array_originals(name: str, pixels: Iterable[NDArray[np.uint8]]) -> list[ArrayOriginal]:
    """One original per image of a data set that is in memory."""
    return [ArrayOriginal(f"image {place} of {name}", np.asarray(image)) for place, image in enumerate(pixels)]
