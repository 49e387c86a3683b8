"""From an image file to the pixels that the graph reads. Training uses the same functions as the server.

A photo of more than a megapixel is reduced before it is converted and resized: a JPEG file by the decoder, which takes
a fraction of the time and memory, and other formats by averaging blocks of pixels. The result has at least twice the
pixels per side that are needed.

The format is detected from the content alone. The first frame of an animation or multi-picture file is the image.
Colour profiles are not applied.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps
from PIL.JpegImagePlugin import get_sampling

from serving.bundle.errors import ImageError
from serving.bundle.png_limits import check_unpacked, png_file
from serving.bundle.sections import ImageSpec
from serving.bundle.structure import Structure, examine
from serving.bundle.webp_tables import table_bytes

_SIGNATURES = {
    "PNG": re.compile(rb"\x89PNG\r\n\x1a\n"),
    "JPEG": re.compile(rb"\xff\xd8\xff"),
    "WEBP": re.compile(rb"RIFF.{4}WEBP", re.DOTALL),
    "BMP": re.compile(rb"BM"),
}
FORMATS = tuple(_SIGNATURES)
BACKGROUND = "white"
"""Shown behind transparent pixels, as on a web page."""

_ORIENTATION, _SCANS, _TABLES = "openworld orientation", "openworld scans", "openworld tables"
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

MOST_LOSSY = 62_000_000
"""Bytes of a lossy WebP file's pixels, three each, and of what they are packed into: at most a second of processor
time."""

STRIP = 256 * 1024
"""Pixels of a large image that are converted at a time, to bound memory."""


LARGE = 1_000_000
"""Pixels above which an image is reduced before it is converted and resized."""
SPARE = 2
"""An image is decoded at reduced size only if each side keeps at least this many times the pixels that are needed."""

_BYTES = {"WEBP": 16, "JPEG": 4, "PNG": 4, "BMP": 4}
"""Bytes of memory per pixel while an image is decoded, at most; test_pixels.py measures them."""
_BESIDE_TABLES = 12
"""Bytes of memory per pixel of a WebP file while there are the tables of its codes, which come on top."""
_COEFFICIENTS = {0: 6, 1: 4, 2: 3}
"""Bytes per pixel of a progressive JPEG file in colour, all of which the decoder holds: by its colour subsampling."""


@dataclass(frozen=True)
class Limits:
    """How large an image may be. It is known from the header, before any pixel is decoded."""

    size: int = 32 * 1024 * 1024
    pixels: int = 50_000_000
    side: int = 16_384
    """Pixels per side: a row or column of millions of pixels costs several times a square of the same area."""
    memory: int = 256_000_000
    """Bytes that decoding may take; formats that are decoded as a whole reach it with fewer pixels."""

    def __post_init__(self) -> None:
        if min(self.size, self.pixels, self.side, self.memory) <= 0:
            raise ValueError(f"limits must be positive, such as Limits(); got {self}")


LIMITS = Limits()
ANY_SIZE = Limits(size=sys.maxsize, pixels=sys.maxsize, side=sys.maxsize, memory=sys.maxsize)
"""For images that a server accepted before, within its own limits."""


def load_decoders() -> None:
    """Import what decodes the formats. With the first WebP file, Pillow would import all formats that it knows."""
    Image.preinit()
    importlib.import_module("PIL.WebPImagePlugin")


def decode(content: bytes, limits: Limits = LIMITS) -> Image.Image:
    """Decode one PNG, JPEG, WebP or BMP file; raises an ImageError."""
    image = open_image(content, limits)
    with _broken_if_unreadable(f"{len(content)} bytes of {image.format}"):
        image.load()
    return image


def open_image(content: bytes, limits: Limits = LIMITS) -> Image.Image:
    """Read the header of a file, which has the image size; `plain` and `to_pixels` decode the rest.

    Only an image that is not decoded yet can be reduced by the decoder.
    """
    if not content:
        raise ImageError("empty_image", "no image", got="0 bytes", allowed=f"1 to {limits.size} bytes")
    if len(content) > limits.size:
        got, allowed = f"{len(content)} bytes", f"up to {limits.size} bytes"
        raise ImageError("too_many_bytes", "image file too large", got=got, allowed=allowed)
    kind = format_of(content)
    with _broken_if_unreadable(f"{len(content)} bytes of {kind}"):
        structure = examine(content, kind)
        try:
            file = png_file(structure) if kind == "PNG" else io.BytesIO(structure.content)
            image = Image.open(file, formats=(kind,))
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            allowed = f"up to {limits.pixels} pixels"
            raise ImageError("too_many_pixels", "image too large", got=str(error), allowed=allowed) from None
        _check_pixels(image.size, limits)
        _check_memory(image, kind, limits)
        _check_scans(image.size, structure)
        tables = 0
        if kind == "WEBP":
            _check_lossy(image.size, structure)
            tables = table_bytes(structure.content, structure.streams, image.size)
            _check_tables(image.size, tables, limits)
        if kind == "PNG":
            check_unpacked(structure)
    image.info |= {_ORIENTATION: structure.orientation, _SCANS: structure.scans, _TABLES: tables}
    if kind == "BMP" and image.info.get("compression") in _RUN_LENGTHS:
        # Pillow decodes it in Python, which would block every other request for seconds.
        allowed = f"BMP that is not compressed, or {', '.join(FORMATS[:-1])}"
        problem = "compressed BMP is not read here"
        raise ImageError("unsupported_image", problem, got="run-length encoding", allowed=allowed)
    return image


def to_pixels(image: Image.Image, spec: ImageSpec) -> NDArray[np.uint8]:
    """Upright, 8-bit, opaque, centre-cropped to the aspect ratio and resized: uint8 [height, width, channels]."""
    size = (spec.width, spec.height)
    image = plain(image, spec.mode, size, cropped=True)
    if image.size != size:
        image = ImageOps.fit(image, size, method=Image.Resampling.BILINEAR)
    # Twice as fast as numpy's array protocol.
    return np.frombuffer(bytearray(image.tobytes()), dtype=np.uint8).reshape(spec.shape)


def plain(image: Image.Image, mode: str, size: tuple[int, int] | None = None, *, cropped: bool = False) -> Image.Image:
    """The image upright, 8-bit and opaque, in mode L or RGB.

    A large image that is only needed in `size` (width, height) is reduced. If it is also `cropped` to the aspect ratio
    of `size`, the sides that are cut off need not be converted.
    """
    with _broken_if_unreadable(f"{image.format or image.mode} of {image.width} x {image.height} pixels"):
        large = size is not None and image.width * image.height > LARGE
        if large and size is not None:
            # Of the scales 1/2, 1/4 and 1/8 the smallest that has these sides; no effect on other formats.
            image.draft(None, (SPARE * max(size), SPARE * max(size)))
        # A PNG may have its orientation after the pixels.
        image.load()
        turn = _transposition(image)
        box = (0, 0, *image.size)
        if large and size is not None:
            if cropped:
                box = _middle(image.size, size[::-1] if turn in _ROWS_TO_COLUMNS else size)
            # What is not cropped has to fit into `size` with its longer side.
            side = (min if cropped else max)(box[2] - box[0], box[3] - box[1])
            factor = max(1, side // (SPARE * max(size)))
            return _in_strips(image, mode, turn, box, factor)
        if turn is None and image.mode == mode and not image.has_transparency_data:
            return image
        if image.width * image.height > STRIP:
            return _in_strips(image, mode, turn, box)
        flat = _flat(image, mode)
        return flat if turn is None else flat.transpose(turn)


def _middle(size: tuple[int, int], wanted: tuple[int, int]) -> tuple[int, int, int, int]:
    """The largest part in the middle of an image that has the aspect ratio of `wanted`, in whole pixels."""
    (width, height), (wide, high) = size, wanted
    across, down = min(width, -(-height * wide // high)), min(height, -(-width * high // wide))
    left, top = (width - across) // 2, (height - down) // 2
    return left, top, left + across, top + down


def _in_strips(
    image: Image.Image, mode: str, turn: Image.Transpose | None, box: tuple[int, int, int, int], factor: int = 1
) -> Image.Image:
    """Part of an image, converted, reduced and upright, without a copy of it all for every intermediate step."""
    left, top, right, bottom = box
    width, height = -(-(right - left) // factor), -(-(bottom - top) // factor)
    made = Image.new(mode, (height, width) if turn in _ROWS_TO_COLUMNS else (width, height))
    rows = factor * max(1, STRIP // (right - left) // factor)
    for upper in range(top, bottom, rows):
        strip = _flat(image.crop((left, upper, right, min(bottom, upper + rows))), mode)
        strip = strip.reduce(factor) if factor > 1 else strip
        done = (upper - top) // factor
        start = height - done - strip.height if turn in _FIRST_ROW_LAST else done
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
    raise ImageError("unsupported_image", "not a supported image", got=got, allowed=", ".join(FORMATS))


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


def _check_memory(image: Image.Image, kind: str, limits: Limits) -> None:
    """Refuse an image whose decoding takes too much memory."""
    each = _BYTES[kind]
    if kind == "JPEG" and image.info.get("progressive"):
        bands = len(image.getbands())
        # The rest is for the image at half the scale or less.
        each = 1 + (_COEFFICIENTS.get(get_sampling(image), 2 * bands) if bands == 3 else 2 * bands)
    if (needed := each * image.width * image.height) > limits.memory:
        got = f"{kind} of {image.width} x {image.height} pixels, which takes {needed / 1e6:.0f} MB"
        allowed = f"up to {limits.memory / 1e6:.0f} MB, or {limits.memory // each} pixels of this kind"
        raise ImageError("too_many_pixels", "image too large to decode", got=got, allowed=allowed)


def _check_scans(size: tuple[int, int], structure: Structure) -> None:
    if (scanned := structure.scans * size[0] * size[1]) > MOST_SCANNED:
        got, allowed = f"{structure.scans} with {scanned} pixels in all", f"up to {MOST_SCANNED} pixels in all scans"
        raise ImageError("broken_image", "too many scans", got=got, allowed=allowed)


def _check_lossy(size: tuple[int, int], structure: Structure) -> None:
    if 3 * size[0] * size[1] + structure.packed > MOST_LOSSY:
        got = f"WebP of {size[0]} x {size[1]} pixels in {structure.packed} bytes"
        allowed = f"up to {MOST_LOSSY} bytes, where a pixel counts as three"
        raise ImageError("too_many_pixels", "image too large to decode", got=got, allowed=allowed)


def _check_tables(size: tuple[int, int], tables: int, limits: Limits) -> None:
    if (needed := _BESIDE_TABLES * size[0] * size[1] + tables) > limits.memory:
        got = f"WebP of {size[0]} x {size[1]} pixels, which takes {needed / 1e6:.0f} MB with the tables of its codes"
        allowed = f"up to {limits.memory / 1e6:.0f} MB"
        raise ImageError("too_many_pixels", "image too large to decode", got=got, allowed=allowed)


def decoding_work(image: Image.Image) -> int:
    """How much an opened image takes to decode, in time or memory, in pixels of an image with one scan."""
    scans = int(image.info.get(_SCANS, 1))
    # Most of the time is spent on pixels, not on the coefficients of another scan.
    return image.width * image.height * (15 + scans) // 16 + int(image.info.get(_TABLES, 0)) // _BYTES["WEBP"]


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
