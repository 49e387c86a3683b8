"""From an image file to the pixels that the graph reads. Training uses the same functions as the server.

The format is detected from the content alone. The first frame of an animation or multi-picture file is the image.
Colour profiles are not applied.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from serving.bundle.errors import ImageError
from serving.bundle.manifest import ImageSpec
from serving.bundle.structure import Structure, examine

_SIGNATURES = {
    "PNG": re.compile(rb"\x89PNG\r\n\x1a\n"),
    "JPEG": re.compile(rb"\xff\xd8\xff"),
    "WEBP": re.compile(rb"RIFF.{4}WEBP", re.DOTALL),
    "BMP": re.compile(rb"BM"),
}
FORMATS = tuple(_SIGNATURES)
BACKGROUND = "white"
"""Shown behind transparent pixels, as on a web page."""

_ORIENTATION, _SCANS = "openworld orientation", "openworld scans"
"""Where `open_image` notes in an image's `info` what the walk over its file has found."""
_RUN_LENGTHS = (1, 2)
"""BMP's codes for run-length encoding with 8 and with 4 bits per pixel."""
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_ROWS_TO_COLUMNS = {_UPRIGHT[orientation] for orientation in (5, 6, 7, 8)}
"""These turn rows into columns."""
_FIRST_ROW_LAST = {_UPRIGHT[orientation] for orientation in (3, 4, 6, 7)}
"""These turn the first row into the last row or column."""

MOST_SCANNED = 700_000_000
"""Pixels in all scans of a JPEG file together, at most a second of processor time; a progressive one has 14 scans."""

STRIP = 256 * 1024
"""Pixels of a large image that are converted at a time, to bound memory."""


@dataclass(frozen=True)
class Limits:
    """How large an image may be. Pixels are counted from the header, before any is decoded."""

    size: int = 10 * 1024 * 1024
    pixels: int = 16_000_000
    side: int = 16_384
    """Pixels per side: a row or column of millions of pixels costs several times a square of the same area."""

    def __post_init__(self) -> None:
        if self.size <= 0 or self.pixels <= 0 or self.side <= 0:
            raise ValueError(f"limits must be positive, such as Limits(); got {self}")


LIMITS = Limits()
ANY_SIZE = Limits(size=sys.maxsize, pixels=sys.maxsize, side=sys.maxsize)
"""For images that a server accepted before, within its own limits."""


def decode(content: bytes, limits: Limits = LIMITS) -> Image.Image:
    """Decode one PNG, JPEG, WebP or BMP file; raises an ImageError."""
    image = open_image(content, limits)
    with _broken_if_unreadable(f"{len(content)} bytes of {image.format}"):
        image.load()
    return image


def open_image(content: bytes, limits: Limits = LIMITS) -> Image.Image:
    """Read the header of a file, which has the image size; `plain` and `to_pixels` decode the rest."""
    if not content:
        raise ImageError("empty_image", "no image", got="0 bytes", allowed=f"1 to {limits.size} bytes")
    if len(content) > limits.size:
        got, allowed = f"{len(content)} bytes", f"up to {limits.size} bytes"
        raise ImageError("too_many_bytes", "image file too large", got=got, allowed=allowed)
    kind = format_of(content)
    with _broken_if_unreadable(f"{len(content)} bytes of {kind}"):
        structure = examine(content, kind)
        try:
            image = Image.open(io.BytesIO(structure.content), formats=(kind,))
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            allowed = f"up to {limits.pixels} pixels"
            raise ImageError("too_many_pixels", "image too large", got=str(error), allowed=allowed) from None
        _check_pixels(image.size, limits)
        _check_scans(image.size, structure)
    image.info |= {_ORIENTATION: structure.orientation, _SCANS: structure.scans}
    if kind == "BMP" and image.info.get("compression") in _RUN_LENGTHS:
        # Pillow decodes it in Python, which would block every other request for seconds.
        allowed = f"BMP that is not compressed, or {', '.join(FORMATS[:-1])}"
        problem = "compressed BMP is not read here"
        raise ImageError("unsupported_image", problem, got="run-length encoding", allowed=allowed)
    return image


def to_pixels(image: Image.Image, spec: ImageSpec) -> NDArray[np.uint8]:
    """Upright, 8-bit, opaque, centre-cropped to the aspect ratio and resized: uint8 [height, width, channels]."""
    image = plain(image, spec.mode)
    size = (spec.width, spec.height)
    if image.size != size:
        image = ImageOps.fit(image, size, method=Image.Resampling.BILINEAR)
    # Twice as fast as numpy's array protocol.
    return np.frombuffer(bytearray(image.tobytes()), dtype=np.uint8).reshape(spec.shape)


def plain(image: Image.Image, mode: str) -> Image.Image:
    """The image upright, 8-bit and opaque, in mode L or RGB."""
    with _broken_if_unreadable(f"{image.format or image.mode} of {image.width} x {image.height} pixels"):
        # A PNG may have its orientation after the pixels.
        image.load()
        turn = _transposition(image)
        if turn is None and image.mode == mode and not image.has_transparency_data:
            return image
        if image.width * image.height > STRIP:
            return _in_strips(image, mode, turn)
        flat = _flat(image, mode)
        return flat if turn is None else flat.transpose(turn)


def _in_strips(image: Image.Image, mode: str, turn: Image.Transpose | None) -> Image.Image:
    """The same pixels as `plain`, without a copy of the whole image for every intermediate step."""
    width, height = image.size
    made = Image.new(mode, (height, width) if turn in _ROWS_TO_COLUMNS else (width, height))
    rows = max(1, STRIP // width)
    for top in range(0, height, rows):
        bottom = min(height, top + rows)
        strip = _flat(image.crop((0, top, width, bottom)), mode)
        start = height - bottom if turn in _FIRST_ROW_LAST else top
        strip = strip if turn is None else strip.transpose(turn)
        made.paste(strip, (start, 0) if turn in _ROWS_TO_COLUMNS else (0, start))
    return made


def _flat(image: Image.Image, mode: str) -> Image.Image:
    image = _opaque(_eight_bit(image))
    return image if image.mode == mode else image.convert(mode)


def format_of(content: bytes) -> str:
    """The format that the first bytes indicate."""
    for name, signature in _SIGNATURES.items():
        if signature.match(content):
            return name
    got = f"content that starts with {content[:8]!r}"
    raise ImageError("unsupported_image", "not an image that is read here", got=got, allowed=", ".join(FORMATS))


def _check_pixels(size: tuple[int, int], limits: Limits) -> None:
    width, height = size
    if width <= 0 or height <= 0:
        raise ValueError(f"{width} x {height} pixels")
    if width * height > limits.pixels:
        got, allowed = f"{width} x {height} pixels", f"up to {limits.pixels} pixels"
        raise ImageError("too_many_pixels", "image too large", got=got, allowed=allowed)
    if max(size) > limits.side:
        got, allowed = f"{width} x {height} pixels", f"up to {limits.side} pixels per side"
        raise ImageError("too_many_pixels", "image too long", got=got, allowed=allowed)


def _check_scans(size: tuple[int, int], structure: Structure) -> None:
    if (scanned := structure.scans * size[0] * size[1]) > MOST_SCANNED:
        got, allowed = f"{structure.scans} with {scanned} pixels in all", f"up to {MOST_SCANNED} pixels in all scans"
        raise ImageError("broken_image", "too many scans", got=got, allowed=allowed)


def decoding_work(image: Image.Image) -> int:
    """How long an opened image takes to decode, in pixels of an image with one scan."""
    scans = int(image.info.get(_SCANS, 1))
    # Most of the time is spent on pixels, not on the coefficients of another scan.
    return image.width * image.height * (15 + scans) // 16


@contextlib.contextmanager
def _broken_if_unreadable(got: str) -> Iterator[None]:
    try:
        yield
    except ImageError:
        raise
    except Exception as error:
        # Pillow raises almost any exception for hostile bytes: OSError, SyntaxError, struct.error, zlib.error ...
        got, allowed = f"{got}: {type(error).__name__}: {error}", "a complete, undamaged file"
        raise ImageError("broken_image", "image cannot be read", got=got, allowed=allowed) from error


def _transposition(image: Image.Image) -> Image.Transpose | None:
    """The transposition that makes an image upright that `open_image` has opened."""
    return _UPRIGHT.get(image.info.get(_ORIENTATION, 1))


def _eight_bit(image: Image.Image) -> Image.Image:
    """Deep greyscale to 8 bit: integers are taken as 0..65535, floats as 0..1; values outside are clipped."""
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
    transparent = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, BACKGROUND), transparent)
