"""From an image file to the pixels that the graph takes; training imports `to_pixels`, so both see the same image.

Formats are told by content alone. Of an animation or a multi-picture file the first frame is the image. Colour
profiles are not applied.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from serving.bundle import ImageSpec
from serving.errors import (
    BrokenImageError,
    EmptyImageError,
    ImageFormatError,
    RequestError,
    TooManyBytesError,
    TooManyPixelsError,
)

FORMATS = ("PNG", "JPEG", "WEBP", "BMP")
BEHIND_GLASS = "white"
"""What shows through transparent pixels: a web page shows them so."""

_ORIENTATION_TAG = 0x0112
_RUN_LENGTHS = (1, 2)
"""BMP's numbers for its compressions of 8 and of 4 bits."""
_END_OF_IMAGE, _START_OF_SCAN = 0xD9, 0xDA
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIDEWAYS = {_UPRIGHT[orientation] for orientation in (5, 6, 7, 8)}
"""A row becomes a column."""
_FROM_THE_END = {_UPRIGHT[orientation] for orientation in (3, 4, 6, 7)}
"""The first row becomes the last row or column."""

MOST_SCANS, MOST_SEGMENTS = 64, 4096
"""Of a JPEG file. A progressive one has about ten scans; a few bytes more can ask for all pixels once again."""
_MARKER = re.compile(rb"\xff[\xc0-\xcf\xd8-\xfe]")
"""What ends the pixels of a scan, and begins a segment: not an escaped 0xff, a restart or filling."""

STRIP = 256 * 1024
"""Pixels of a large image that are converted together."""


@dataclass(frozen=True)
class Limits:
    """How large an image may be; pixels are counted from the header, before any is decoded."""

    size: int = 10 * 1024 * 1024
    pixels: int = 16_000_000

    def __post_init__(self) -> None:
        if self.size <= 0 or self.pixels <= 0:
            raise ValueError(f"limits must be positive, such as Limits(); got {self}")


LIMITS = Limits()


def decode(content: bytes, limits: Limits = LIMITS) -> Image.Image:
    """Read one PNG, JPEG, WebP or BMP file whole, or raise a RequestError."""
    image = open_image(content, limits)
    with _broken_if_unreadable(f"{len(content)} bytes of {image.format}"):
        image.load()
    return image


def open_image(content: bytes, limits: Limits = LIMITS) -> Image.Image:
    """Read the head of a file, which says how large the image is; `plain` and `to_pixels` read the rest."""
    if not content:
        raise EmptyImageError("no image", got="0 bytes", allowed=f"1 to {limits.size} bytes")
    if len(content) > limits.size:
        raise TooManyBytesError(
            "image file too large", got=f"{len(content)} bytes", allowed=f"up to {limits.size} bytes"
        )
    kind = format_of(content)
    with _broken_if_unreadable(f"{len(content)} bytes of {kind}"):
        _check_work(content, kind)
        try:
            image = Image.open(io.BytesIO(content), formats=(kind,))
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            allowed = f"up to {limits.pixels} pixels"
            raise TooManyPixelsError("image too large", got=str(error), allowed=allowed) from None
        _check_pixels(image.size, limits)
    if kind == "BMP" and image.info.get("compression") in _RUN_LENGTHS:
        # Pillow unpacks it in Python, which would hold up everything else for seconds.
        allowed = f"BMP that is not compressed, or {', '.join(FORMATS[:-1])}"
        raise ImageFormatError("compressed BMP is not read here", got="run-length encoding", allowed=allowed)
    return image


def to_pixels(image: Image.Image, spec: ImageSpec) -> NDArray[np.uint8]:
    """Upright, 8-bit, opaque, centre-cropped to the aspect ratio and resized: uint8 [height, width, channels]."""
    image = plain(image, spec.mode)
    size = (spec.width, spec.height)
    if image.size != size:
        image = ImageOps.fit(image, size, method=Image.Resampling.BILINEAR)
    # Through numpy's own protocol for arrays it would take twice as long.
    return np.frombuffer(bytearray(image.tobytes()), dtype=np.uint8).reshape(spec.shape)


def plain(image: Image.Image, mode: str) -> Image.Image:
    """Upright, 8-bit and opaque, in the mode L or RGB."""
    with _broken_if_unreadable(f"{image.format or image.mode} of {image.width} x {image.height} pixels"):
        # A PNG may say how it was turned behind its pixels.
        image.load()
        turn = _turn(image)
        if turn is None and image.mode == mode and not image.has_transparency_data:
            return image
        if image.width * image.height > STRIP:
            return _in_strips(image, mode, turn)
        flat = _flat(image, mode)
        return flat if turn is None else flat.transpose(turn)


def _in_strips(image: Image.Image, mode: str, turn: Image.Transpose | None) -> Image.Image:
    """The same pixels, without a copy of the whole image for every step between."""
    width, height = image.size
    made = Image.new(mode, (height, width) if turn in _SIDEWAYS else (width, height))
    rows = max(1, STRIP // width)
    for top in range(0, height, rows):
        bottom = min(height, top + rows)
        strip = _flat(image.crop((0, top, width, bottom)), mode)
        start = height - bottom if turn in _FROM_THE_END else top
        made.paste(strip if turn is None else strip.transpose(turn), (start, 0) if turn in _SIDEWAYS else (0, start))
    return made


def _flat(image: Image.Image, mode: str) -> Image.Image:
    image = _opaque(_eight_bit(image))
    return image if image.mode == mode else image.convert(mode)


def format_of(content: bytes) -> str:
    """The format that the first bytes announce."""
    if content.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if content.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if content.startswith(b"RIFF") and content[8:12] == b"WEBP":
        return "WEBP"
    if content.startswith(b"BM"):
        return "BMP"
    raise ImageFormatError(
        "not an image that is read here", got=f"content that starts with {content[:8]!r}", allowed=", ".join(FORMATS)
    )


def _check_pixels(size: tuple[int, int], limits: Limits) -> None:
    width, height = size
    if width <= 0 or height <= 0:
        raise ValueError(f"{width} x {height} pixels")
    if width * height > limits.pixels:
        raise TooManyPixelsError(
            "image too large", got=f"{width} x {height} pixels", allowed=f"up to {limits.pixels} pixels"
        )


def _check_work(content: bytes, kind: str) -> None:
    """Refuse what would take far longer to decode than its size in bytes and pixels says."""
    # Elsewhere than in a marker these two bytes stand by chance: only where they are many is it worth a closer look.
    if kind == "JPEG" and content.count(b"\xff\xda") > MOST_SCANS:
        _check_scans(content)
    # Each is unpacked, although profiles are not applied.
    if kind == "PNG" and (profiles := content.count(b"iCCP")) > 1:
        raise BrokenImageError("too many colour profiles", got=f"{profiles} iCCP chunks", allowed="one")


def _check_scans(content: bytes) -> None:
    """Count the scans of a JPEG file up to its end: what is appended, such as a film, is not decoded."""
    scans, place = 0, 2
    for _ in range(MOST_SEGMENTS):
        found = _MARKER.search(content, place)
        if found is None or content[found.start() + 1] == _END_OF_IMAGE:
            return
        scans += content[found.start() + 1] == _START_OF_SCAN
        if scans > MOST_SCANS:
            break
        # A marker is followed by the length of what belongs to it.
        place = found.end() + int.from_bytes(content[found.end() : found.end() + 2])
    allowed = f"up to {MOST_SCANS} scans in {MOST_SEGMENTS} segments"
    raise BrokenImageError("too many scans", got=f"at least {scans}", allowed=allowed)


@contextlib.contextmanager
def _broken_if_unreadable(got: str) -> Iterator[None]:
    try:
        yield
    except RequestError:
        raise
    except Exception as error:
        # Pillow meets hostile bytes with almost any exception: OSError, SyntaxError, struct.error, zlib.error ...
        got = f"{got}: {type(error).__name__}: {error}"
        raise BrokenImageError("image cannot be read", got=got, allowed="a complete, undamaged file") from error


def _turn(image: Image.Image) -> Image.Transpose | None:
    """What makes it upright."""
    if not image.info:
        return None
    try:
        orientation = image.getexif().get(_ORIENTATION_TAG)
    except Exception:
        # A photograph whose EXIF block is damaged is still a photograph.
        return None
    return _UPRIGHT.get(orientation) if isinstance(orientation, int) else None


def _eight_bit(image: Image.Image) -> Image.Image:
    """Deep greyscale to 8 bit: integers count as 0..65535, floats as 0..1, and what lies outside is clipped."""
    if image.mode.startswith("I"):
        deep: NDArray[Any] = np.clip(np.asarray(image, dtype=np.int64), 0, 65535)
        return Image.fromarray(((deep + 128) // 257).astype(np.uint8))
    if image.mode == "F":
        deep = np.clip(np.nan_to_num(np.asarray(image, dtype=np.float64)), 0.0, 1.0)
        return Image.fromarray(np.rint(deep * 255).astype(np.uint8))
    return image


def _opaque(image: Image.Image) -> Image.Image:
    if not image.has_transparency_data:
        return image
    glass = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", glass.size, BEHIND_GLASS), glass)
