"""Image files of the quarantine, for browsers."""

from __future__ import annotations

import io
from typing import NamedTuple

from serving.bundle.pixels import ANY_SIZE, format_of, open_image, plain

MEDIA_TYPES = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "BMP": "image/bmp"}
SIDE, SMALL = 256, 64 * 1024
"""Side of a thumbnail in pixels, and the largest file in bytes that may be its own thumbnail."""


class Picture(NamedTuple):
    content: bytes
    media_type: str


def picture(content: bytes) -> Picture:
    """The file with the type of its content; an ImageError if the format is not a supported one."""
    return Picture(content, MEDIA_TYPES[format_of(content)])


def thumbnail(content: bytes) -> Picture:
    """An image of at most SIDE x SIDE pixels; small images are returned unchanged."""
    image = open_image(content, ANY_SIZE)
    if len(content) <= SMALL and max(image.size) <= SIDE:
        return picture(content)
    upright = plain(image, "RGB", (SIDE, SIDE))
    upright.thumbnail((SIDE, SIDE))
    stored = io.BytesIO()
    upright.save(stored, "JPEG", quality=85)
    return Picture(stored.getvalue(), MEDIA_TYPES["JPEG"])
