"""The pixels of images, also of those that a run holds as encoded vectors: these are read again."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from serving.bundle.errors import ImageError
from serving.bundle.pixels import to_pixels
from serving.bundle.sections import ImageSpec
from training.data.images import Images


def reread(images: Images, spec: ImageSpec) -> tuple[NDArray[np.uint8], Images]:
    """Pixels [n, height, width, channels] as a server computes them, and the images that can still be read."""
    if images.originals is None:
        return images.pixels, images
    pixels = np.empty((len(images), *spec.shape), np.uint8)
    kept: list[int] = []
    for place, original in enumerate(images.originals):
        try:
            pixels[len(kept)] = to_pixels(original.image(original.content()), spec)
        except (ImageError, OSError):
            continue
        kept.append(place)
    return pixels[: len(kept)], images.at(np.array(kept, int))
