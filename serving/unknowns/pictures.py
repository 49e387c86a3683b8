"""Image files of the quarantine, as a browser may have them."""

from __future__ import annotations

import io
import sys
from typing import NamedTuple

from serving.preprocess import Limits, decode, format_of, plain

MEDIA_TYPES = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "BMP": "image/bmp"}
SIDE, SMALL = 256, 64 * 1024
"""Pixels of a thumbnail, and bytes of a file that may be its own."""
_ANY = Limits(size=sys.maxsize, pixels=sys.maxsize)
"""The server let these images in, under limits of its own."""


class Picture(NamedTuple):
    content: bytes
    media_type: str


def picture(content: bytes) -> Picture:
    """The file with its type, which its own first bytes tell; a RequestError if it is none that was ever let in."""
    return Picture(content, MEDIA_TYPES[format_of(content)])


def thumbnail(content: bytes) -> Picture:
    """At most SIDE pixels wide and high; small images stay as they are, and crisp."""
    image = decode(content, _ANY)
    if len(content) <= SMALL and max(image.size) <= SIDE:
        return picture(content)
    upright = plain(image, "RGB")
    upright.thumbnail((SIDE, SIDE))
    stored = io.BytesIO()
    upright.save(stored, "JPEG", quality=85)
    return Picture(stored.getvalue(), MEDIA_TYPES["JPEG"])
