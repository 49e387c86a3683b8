"""Images as programs and notebooks have them: files, bytes, open files, Pillow's images and arrays of pixels."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from serving.errors import BrokenImageError, EmptyImageError, ImageFormatError, RequestError, UnreadableFileError
from serving.pictures import png_of
from serving.teaching.errors import TeachError

Picture = bytes | str | os.PathLike[str] | BinaryIO | Image.Image | NDArray[np.uint8]
"""The path of an image file, its bytes, a file that is open for reading bytes, an image of Pillow, or pixels as a uint8
array [height, width, 3] or [height, width]."""

ALLOWED = (
    "a path, the bytes of an image file, a file opened with 'rb', an image of Pillow, or a uint8 array "
    "[height, width, 3] or [height, width]"
)
EXAMPLE = 'teach({"cow": ["cow1.jpg", "cow2.jpg"]})'


def content_of(image: Picture) -> bytes:
    """The bytes of an image file; of pixels, those of a PNG file. Raises a RequestError."""
    if isinstance(image, bytes | bytearray | memoryview):
        return bytes(image)
    if isinstance(image, str | os.PathLike):
        return _of_path(image)
    if isinstance(image, np.ndarray):
        return _of_array(image)
    if isinstance(image, Image.Image):
        return _of_pillow(image)
    if hasattr(image, "read"):
        return _of_file(image)
    raise _refused(f"{type(image).__module__}.{type(image).__qualname__}")


def images_of(label: str, given: Any) -> list[Picture]:
    """The images of one class, of which there is at least one; a TeachError if the value is no list of images."""
    single = isinstance(given, np.ndarray) and given.ndim < 4
    if single or isinstance(given, bytes | bytearray | memoryview | str | os.PathLike | Image.Image | io.IOBase):
        kind = f"{given!r}"[:100] if isinstance(given, str | os.PathLike) else f"one {type(given).__name__}"
        raise TeachError(f"{label!r}: {kind}; allowed: a list of images, as in {EXAMPLE}")
    if not isinstance(given, Iterable) or hasattr(given, "read"):
        raise TeachError(f"{label!r}: a value of type {type(given).__name__}; allowed: a list, as in {EXAMPLE}")
    images = list(given)
    if not images:
        raise TeachError(f"{label!r}: no images; allowed: at least one, as in {EXAMPLE}")
    return images


def name_of(image: Picture, number: int) -> str:
    """How a message names an image: its path or the name of its file, or else its place in the list."""
    name = image if isinstance(image, str | os.PathLike) else getattr(image, "filename", getattr(image, "name", ""))
    return repr(os.fspath(name)) if isinstance(name, str | os.PathLike) and name else f"image {number}"


def _of_path(path: str | os.PathLike[str]) -> bytes:
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UnreadableFileError(
            "file cannot be read", got=f"{os.fspath(path)}: {reason}", allowed="an image file"
        ) from error


def _of_file(file: Any) -> bytes:
    """All of a file, wherever it was read up to before."""
    try:
        if getattr(file, "seekable", bool)():
            file.seek(0)
        content = file.read()
    except (OSError, ValueError) as error:
        raise UnreadableFileError("file cannot be read", got=str(error), allowed="an open image file") from error
    if not isinstance(content, bytes):
        raise _refused(f"a file that returns {type(content).__name__}")
    return content


def _of_pillow(image: Image.Image) -> bytes:
    if not (image.width and image.height):
        raise EmptyImageError("no image", got=f"{image.width} x {image.height} pixels", allowed="1 pixel or more")
    try:
        return png_of(image)
    except ValueError as error:
        raise _refused(str(error)) from error
    except Exception as error:
        # Pillow reads the pixels now, and raises almost any exception for damaged ones.
        got = f"{type(error).__name__}: {error}"
        raise BrokenImageError("image cannot be read", got=got, allowed="a complete, undamaged image") from error


def _of_array(pixels: NDArray[Any]) -> bytes:
    plane = pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] == 3)
    if pixels.dtype != np.uint8 or not plane or not pixels.size:
        raise _refused(f"an array {list(pixels.shape)} of {pixels.dtype}")
    return _of_pillow(Image.fromarray(np.ascontiguousarray(pixels)))


def _refused(got: str) -> RequestError:
    return ImageFormatError("not a supported image", got=got, allowed=ALLOWED)
