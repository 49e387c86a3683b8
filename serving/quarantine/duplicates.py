"""Which images are the same to the eye: a fingerprint of 97 numbers, and when two of them are one image.

The numbers are the luminance on a grid of 8 x 8, the two colour differences on 4 x 4, and the shape. Compared is the
luminance without its mean and in units of its contrast, so that an image may be a little brighter, be resized or lose
quality. Where the limits lie was measured: see docs/open-world.md and tests/serving/quarantine/test_duplicates.py.
"""

from __future__ import annotations

import io
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from serving.preprocess import FORMATS, plain

Floats = NDArray[np.float32]

FINE, COARSE = 8, 4
LENGTH = FINE**2 + 2 * COARSE**2 + 1

MOST_DIFFERENCE = 0.0009
"""Half the mean squared difference of the luminance, in units of squared contrast (so: 1 - correlation)."""
MOST_DIFFERENCE_ANYWHERE = 0.2
"""In one cell of the grid, in units of contrast: a small thing that came into view is a difference."""
MOST_COLOUR = 12.0
"""Levels of 255, in one cell."""
MOST_BRIGHTER = 24.0
MOST_CONTRAST = 1.2
MOST_ASPECT = 0.1
"""In powers of two."""
LEAST_CONTRAST = 16.0
"""Levels; the unit for images that have less, so that noise in a plain sky is not taken for content."""
FLAT = 4.0
"""Levels; an image with less contrast has nothing but its brightness to know it by ..."""
MOST_BRIGHTER_FLAT = 2.0
"""... which may then differ by so many levels only."""

_WORKING_SIZE = 64
"""Everything is brought to this first: an image of 16 x 16 and one twice as large then look alike on the grid."""
_DRAFT = (128, 128)


@dataclass(frozen=True)
class Look:
    """What is to be seen in an image file: its size, its format and its fingerprint."""

    width: int
    height: int
    media_type: str
    fingerprint: bytes


def look_at(content: bytes) -> Look:
    """Read an image file that was answered before; raises almost anything if it is none."""
    with Image.open(io.BytesIO(content), formats=FORMATS) as image:
        width, height = image.size
        media_type = Image.MIME[image.format or ""]
        # A JPEG can be decoded at an eighth of its size, at a fraction of the cost.
        image.draft(None, _DRAFT)
        small = plain(image, "RGB").resize((_WORKING_SIZE, _WORKING_SIZE), Image.Resampling.BILINEAR)
    luminance, *colours = small.convert("YCbCr").split()
    aspect = np.array([math.log2(width / height)], dtype=np.float32)
    numbers = [_grid(luminance, FINE), *(_grid(colour, COARSE) for colour in colours), aspect]
    return Look(width, height, media_type, np.concatenate(numbers).astype("<f2").tobytes())


def _grid(channel: Image.Image, cells: int) -> Floats:
    # As floats, so that nothing is rounded: in a flat image a level is a lot.
    shrunk = channel.convert("F").resize((cells, cells), Image.Resampling.BILINEAR)
    return np.asarray(shrunk, dtype=np.float32).ravel()


class Fingerprints:
    """Those of all images of a store, in memory; finds the ones that show the same as a given one."""

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
        """If it is there; the last row takes the place of the one that goes."""
        row, last = self._rows.pop(item_id, None), len(self._rows)
        if row is not None and row != last:
            moved = int(self._ids[last])
            for values in (self._ids, self._numbers, self._shapes, self._energy):
                values[row] = values[last]
            self._rows[moved] = row

    def same_as(self, fingerprint: bytes) -> list[int]:
        """Ids of the items that show the same image, the most alike first."""
        count = len(self._rows)
        numbers = _numbers(fingerprint)
        shape = _shape(numbers)
        # Not `@`: for something so small BLAS would wake threads that the graph needs.
        product = np.einsum("ij,j->i", self._shapes[:count], shape)
        distances = 0.5 * (self._energy[:count] + np.square(shape).sum()) - product
        near = (distances <= MOST_DIFFERENCE).nonzero()[0]
        rows = near[np.argsort(distances[near], kind="stable")]
        return [int(self._ids[row]) for row in rows if _same(numbers, self._numbers[row])]

    def _grow(self) -> None:
        room = max(256, 2 * len(self._ids))
        for name in ("_ids", "_numbers", "_shapes", "_energy"):
            values = getattr(self, name)
            larger = np.zeros((room, *values.shape[1:]), dtype=values.dtype)
            larger[: len(values)] = values
            setattr(self, name, larger)


def _numbers(fingerprint: bytes) -> Floats:
    return np.frombuffer(fingerprint, dtype="<f2").astype(np.float32)


def _contrast(numbers: Floats) -> float:
    return max(float(numbers[: FINE**2].std()), LEAST_CONTRAST)


def _shape(numbers: Floats) -> Floats:
    """The luminance without mean, in units of contrast; of length 1 unless the image is flat."""
    luminance = numbers[: FINE**2]
    shape: Floats = (luminance - luminance.mean()) / np.float32(FINE * _contrast(numbers))
    return shape


def _same(one: Floats, other: Floats) -> bool:
    """Whether two fingerprints whose luminance is alike on the whole are of one image."""
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
