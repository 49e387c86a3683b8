"""Views of photos for CSI: each photo in four rotations, as it is and augmented, the same in every run.

The random numbers of a view come from the photo's own pixels and the seed of the run, so it does not matter which
photos are encoded together, in which order, or in how many attempts.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from serving.bundle.pixels import to_pixels
from serving.bundle.sections import ImageSpec
from training.config import Augmentation
from training.data.image_encoder import View
from training.data.images import Images
from training.host.seeds import seed_from

MARGIN = 1.25
"""Augmented views are cut out of a photo whose side is this many times the side of the trunk's images."""
TRIES = 10
"""Boxes that are drawn for a crop; if none of them fits into the image, the whole image is taken."""

Picture = Image.Image
Random = np.random.Generator
Encode = Callable[[Images, View, str], Images]
"""Images, a view and how to call that while it is shown -> the encoded vectors of that view."""


def turned_view(rotations: int) -> View:
    """The photo as a server sees it, turned by 90, 180, ... degrees; the upright one is the plain view."""
    return View(f"turned{rotations}", partial(_turned, rotations), rotations - 1)


def in_rotations(images: Images, rotations: int, encode: Encode, name: str) -> NDArray[np.float32]:
    """Encoded images in this number of rotations, the upright one first: [n, rotations, dim]."""
    upright: NDArray[np.float32] = images.pixels[:, None]
    if rotations == 1:
        return upright
    turned = encode(images, turned_view(rotations), name).pixels
    return np.concatenate([upright, turned.reshape(len(images), rotations - 1, -1)], axis=1)


def augmented_view(number: int, seed: int, rotations: int, how: Augmentation) -> View:
    """The `number`-th augmentation of a photo: mirrored or not, in each rotation, with other random changes in each."""
    settings = hashlib.sha256(repr(how).encode()).hexdigest()[:8]
    name = f"csi{number}-{rotations}-{seed}-{settings}"
    return View(name, partial(_augmented, seed_from(seed, name), rotations, how), rotations)


def _turned(rotations: int, image: Picture, spec: ImageSpec) -> NDArray[np.uint8]:
    pixels = to_pixels(image, spec)
    return np.stack([np.rot90(pixels, quarters) for quarters in range(1, rotations)])


def _augmented(seed: int, rotations: int, how: Augmentation, image: Picture, spec: ImageSpec) -> NDArray[np.uint8]:
    side = round(MARGIN * spec.height)
    pixels = to_pixels(image, ImageSpec(height=side, width=side, mode="RGB"))
    digest = hashlib.sha256(pixels.tobytes()).digest()
    random = np.random.default_rng([seed, int.from_bytes(digest[:8], "little")])
    whole = Image.fromarray(pixels)
    if how.flip and random.random() < 0.5:
        whole = whole.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    views = []
    for quarters in range(rotations):
        view = _crop(_colours(whole, how, random), how, random, spec.height)
        # Boxes are as often upright as lying, so it does not matter that the crop comes before the rotation.
        views.append(np.rot90(np.asarray(view), quarters))
    return np.stack(views)


def _colours(image: Picture, how: Augmentation, random: Random) -> Picture:
    if random.random() < how.jitter_share:
        changes: list[Callable[[Picture, Augmentation, Random], Picture]] = [_contrast, _hue_saturation_value]
        for change in changes if random.random() < 0.5 else reversed(changes):
            image = change(image, how, random)
    return image.convert("L").convert("RGB") if random.random() < how.grey_share else image


def _factor(random: Random, spread: float) -> float:
    return float(random.uniform(max(0.0, 1 - spread), 1 + spread))


def _table(values: NDArray[np.float64]) -> list[int]:
    """A table of 256 bytes."""
    table: list[int] = np.clip(np.rint(values), 0, 255).astype(int).tolist()
    return table


_LEVELS = np.arange(256.0)


def _contrast(image: Picture, how: Augmentation, random: Random) -> Picture:
    """Each channel further from its mean, or nearer to it."""
    factor = _factor(random, how.contrast)
    means = np.asarray(image).reshape(-1, 3).mean(axis=0)
    return image.point([level for mean in means for level in _table(mean + factor * (_LEVELS - mean))])


def _hue_saturation_value(image: Picture, how: Augmentation, random: Random) -> Picture:
    turn = 256 * random.uniform(-how.hue, how.hue)
    saturation, value = (_factor(random, spread) for spread in (how.saturation, how.brightness))
    tables = [*_table((_LEVELS + turn) % 256 // 1), *_table(saturation * _LEVELS), *_table(value * _LEVELS)]
    return image.convert("HSV").point(tables).convert("RGB")


def _crop(image: Picture, how: Augmentation, random: Random, side: int) -> Picture:
    """A random box, stretched to the full size."""
    width, height = _box(how, random)
    left, top = random.uniform(0, 1 - width), random.uniform(0, 1 - height)
    box = [share * image.width for share in (left, top, left + width, top + height)]
    return image.resize((side, side), Image.Resampling.BILINEAR, box=(box[0], box[1], box[2], box[3]))


def _box(how: Augmentation, random: Random) -> tuple[float, float]:
    """Width and height as shares of the side."""
    for _ in range(TRIES):
        area = random.uniform(*how.crop_area)
        aspect = math.exp(random.uniform(math.log(how.crop_aspect[0]), math.log(how.crop_aspect[1])))
        width, height = math.sqrt(area * aspect), math.sqrt(area / aspect)
        if max(width, height) <= 1:
            return width, height
    return 1.0, 1.0
