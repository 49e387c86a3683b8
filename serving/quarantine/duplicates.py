"""Near-duplicate images: a fingerprint of 97 numbers, and when two fingerprints count as the same image.

The numbers are the luminance on an 8 x 8 grid, the two colour differences on 4 x 4 grids, and the aspect ratio. The
luminance is compared without its mean and in units of its contrast, so that a copy may be slightly brighter, resized or
of lower quality. The limits were measured: see docs/reports/open-world.md and test_quarantine_duplicates.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from serving.bundle.pixels import ANY_SIZE, open_image, plain

Floats = NDArray[np.float32]

FINE, COARSE = 8, 4
LENGTH = FINE**2 + 2 * COARSE**2 + 1

MOST_DIFFERENCE = 0.0009
"""Half the mean squared difference of the luminance, in units of squared contrast (so: 1 - correlation)."""
MOST_DIFFERENCE_ANYWHERE = 0.2
"""In one cell of the grid, in units of contrast: a small object that has appeared makes another image."""
MOST_COLOUR = 12.0
"""Levels of 255, in one cell."""
MOST_BRIGHTER = 24.0
MOST_CONTRAST = 1.2
MOST_ASPECT = 0.1
"""Difference of log2(width / height)."""
LEAST_CONTRAST = 16.0
"""Levels; the unit for images with less contrast, so that noise in a plain sky does not count as content."""
FLAT = 4.0
"""Levels; an image with less contrast can only be recognised by its brightness ..."""
MOST_BRIGHTER_FLAT = 2.0
"""... which may then differ by at most this many levels."""

_WORKING_SIZE = 64
"""Every image is first resized to this, so that an image of 16 x 16 and its enlargement yield the same grid."""
_DRAFT = (128, 128)
_REDUCED = (256, 256)
"""Large images of other formats are reduced to about this, with room for a long and narrow one."""


@dataclass(frozen=True)
class ImageSummary:
    """The size, format and fingerprint of an image file."""

    width: int
    height: int
    media_type: str
    fingerprint: bytes


def summarize(content: bytes) -> ImageSummary:
    """Read an image file that was answered before; raises almost any exception if it is not an image."""
    with open_image(content, ANY_SIZE) as image:
        width, height = image.size
        media_type = Image.MIME[image.format or ""]
        # A JPEG can be decoded at an eighth of its size, at a fraction of the cost.
        image.draft(None, _DRAFT)
        small = plain(image, "RGB", _REDUCED).resize((_WORKING_SIZE, _WORKING_SIZE), Image.Resampling.BILINEAR)
    luminance, *colours = small.convert("YCbCr").split()
    aspect = np.array([math.log2(width / height)], dtype=np.float32)
    numbers = [_grid(luminance, FINE), *(_grid(colour, COARSE) for colour in colours), aspect]
    return ImageSummary(width, height, media_type, np.concatenate(numbers).astype("<f2").tobytes())


def _grid(channel: Image.Image, cells: int) -> Floats:
    # In floats without rounding: one level matters in a flat image.
    shrunk = channel.convert("F").resize((cells, cells), Image.Resampling.BILINEAR)
    return np.asarray(shrunk, dtype=np.float32).ravel()


class Fingerprints:
    """The fingerprints of all images in a store, in memory, to find near-duplicates of a given image."""

    def __init__(self) -> None:
        self._rows: dict[int, int] = {}
        """item id -> its row"""
        self._ids = np.zeros(0, dtype=np.int64)
        self._numbers: Floats = np.zeros((0, LENGTH), dtype=np.float32)
        self._shapes: Floats = np.zeros((0, FINE**2), dtype=np.float32)
        self._energy: Floats = np.zeros(0, dtype=np.float32)

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, item_id: int, fingerprint: bytes) -> None:
        row = len(self._rows)
        if row == len(self._ids):
            self._grow()
        numbers = _numbers(fingerprint)
        self._rows[item_id] = row
        self._ids[row] = item_id
        self._numbers[row] = numbers
        self._shapes[row] = _shape(numbers)
        self._energy[row] = np.square(self._shapes[row]).sum()

    def forget(self, item_id: int) -> None:
        """Remove an item if it is there; the last row moves to its place."""
        row, last = self._rows.pop(item_id, None), len(self._rows)
        if row is not None and row != last:
            moved = int(self._ids[last])
            for values in (self._ids, self._numbers, self._shapes, self._energy):
                values[row] = values[last]
            self._rows[moved] = row

    def same_as(self, fingerprint: bytes) -> list[int]:
        """Ids of the near-duplicates, the most similar first."""
        count = len(self._rows)
        numbers = _numbers(fingerprint)
        shape = _shape(numbers)
        # Not `@`: BLAS would start threads for it, which compete with the graph.
        product = np.einsum("ij,j->i", self._shapes[:count], shape)
        distances = 0.5 * (self._energy[:count] + np.square(shape).sum()) - product
        near = (distances <= MOST_DIFFERENCE).nonzero()[0]
        rows = near[np.argsort(distances[near], kind="stable")]
        return [int(self._ids[row]) for row in rows if _same(numbers, self._numbers[row])]

    def _grow(self) -> None:
        capacity = max(256, 2 * len(self._ids))
        for name in ("_ids", "_numbers", "_shapes", "_energy"):
            values = getattr(self, name)
            larger = np.zeros((capacity, *values.shape[1:]), dtype=values.dtype)
            larger[: len(values)] = values
            setattr(self, name, larger)


def is_fingerprint(value: object) -> TypeGuard[bytes]:
    """Whether it is what `summarize` makes; something else may have changed a row."""
    return isinstance(value, bytes) and len(value) == 2 * LENGTH and bool(np.isfinite(_numbers(value)).all())


def _numbers(fingerprint: bytes) -> Floats:
    return np.frombuffer(fingerprint, dtype="<f2").astype(np.float32)


def _contrast(numbers: Floats) -> float:
    return max(float(numbers[: FINE**2].std()), LEAST_CONTRAST)


def _shape(numbers: Floats) -> Floats:
    """The luminance without its mean in units of contrast; a unit vector unless the image is flat."""
    luminance = numbers[: FINE**2]
    shape: Floats = (luminance - luminance.mean()) / np.float32(FINE * _contrast(numbers))
    return shape


def _same(one: Floats, other: Floats) -> bool:
    """Whether two fingerprints with similar luminance count as the same image."""
    contrasts = _contrast(one), _contrast(other)
    flat = min(one[: FINE**2].std(), other[: FINE**2].std()) < FLAT
    brighter = abs(float(one[: FINE**2].mean() - other[: FINE**2].mean()))
    return bool(
        FINE * np.abs(_shape(one) - _shape(other)).max() <= MOST_DIFFERENCE_ANYWHERE
        and np.abs(one[FINE**2 : -1] - other[FINE**2 : -1]).max() <= MOST_COLOUR
        and brighter <= (MOST_BRIGHTER_FLAT if flat else MOST_BRIGHTER)
        and max(contrasts) <= MOST_CONTRAST * min(contrasts)
        and abs(float(one[-1] - other[-1])) <= MOST_ASPECT
    )
