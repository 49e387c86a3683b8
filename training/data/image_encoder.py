"""From a few originals to their encoded vectors, in a thread of this process or on another machine. Needs no torch."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from models.trunks.trunk import OUTPUT
from serving.bundle.errors import ImageError, ProviderError
from serving.bundle.manifest import INPUT_NAME, Graph
from serving.bundle.pixels import to_pixels
from serving.bundle.providers import wants_cuda
from serving.bundle.sections import ImageSpec
from serving.bundle.session import open_cuda_session, open_session, session_options
from training.data.originals import Original

if TYPE_CHECKING:
    import onnxruntime as ort

CPU_CHUNK, GPU_CHUNK = 8, 64
"""Images that are decoded and encoded at a time."""
HUGE = 20_000_000
"""Pixels above which only one image is decoded at a time, to bound memory."""

Encode = Callable[[NDArray[np.uint8]], NDArray[np.float32]]
Place = tuple[int, Original]
"""An original, and its number among all that are read."""

log = logging.getLogger(__name__)


class View(NamedTuple):
    """A name for the cache, and the pixels of an image: uint8 [vectors, size, size, 3], or [size, size, 3] if 1."""

    name: str
    pixels: Callable[[Image.Image, ImageSpec], NDArray[np.uint8]]
    vectors: int = 1
    """How many vectors an image has in this view; they are computed and stored together."""


PLAIN = View("plain", to_pixels)
"""The view without augmentation: the image as a server sees it."""


class Encoded(NamedTuple):
    """What was found for one image."""

    place: int
    stamp: bytes | None = None
    digest: bytes | None = None
    vector: NDArray[np.float32] | None = None
    """None if the cache has it."""
    problem: str = ""


class ImageEncoder:
    """Reads, decodes and encodes images; may be called in several threads."""

    def __init__(self, image: ImageSpec, encode: Encode) -> None:
        self._image = image
        self._encode = encode
        self._huge = Lock()

    def encoded(self, some: Sequence[Place], view: View, has: Callable[[bytes], bool]) -> list[Encoded]:
        """The vectors of the images that can be read, unless the cache has them: `has` looks up their digest."""
        found, pixels = [], []
        for place, original in some:
            try:
                # Before the content: a file that changes in between gets another stamp.
                stamp, content = original.stamp(), original.content()
                digest = hashlib.sha256(content).digest()
                if has(digest):
                    found.append(Encoded(place, stamp, digest))
                    continue
                pixels.append(self.pixels(original, content, view))
                found.append(Encoded(place, stamp, digest, np.empty(0, np.float32)))
            except (ImageError, OSError) as error:
                found.append(Encoded(place, problem=str(error)))
        vectors = iter(self._encode(np.concatenate(pixels)).reshape(len(pixels), -1) if pixels else ())
        return [one if one.vector is None else one._replace(vector=next(vectors)) for one in found]

    def pixels(self, original: Original, content: bytes, view: View) -> NDArray[np.uint8]:
        """uint8 [vectors, size, size, 3]."""
        image = original.image(content)
        with self._huge if image.width * image.height > HUGE else nullcontext():
            return view.pixels(image, self._image).reshape(view.vectors, *self._image.shape)


def chunk_size(view: View, *, gpu: bool) -> int:
    """How many images in this view are encoded at a time."""
    return max((GPU_CHUNK if gpu else CPU_CHUNK) // view.vectors, 1)


def run_session(session: ort.InferenceSession, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    """uint8 [n, size, size, 3] -> float32 [n, dim]."""
    return np.asarray(session.run([OUTPUT], {INPUT_NAME: pixels})[0])


def open_trunk_session(model: bytes, size: int, provider: str) -> ort.InferenceSession:
    """The graph of a trunk for images of size x size pixels, on the GPU if that works."""
    graph = Graph(model, {})
    if wants_cuda(provider):
        probe = np.zeros((1, size, size, 3), np.uint8)
        try:
            return open_cuda_session(graph, probe, 1)
        except ProviderError as error:
            if provider == "cuda":
                raise
            log.warning("%s; the CPU is used", error)
    # Each thread encodes its own images, which uses the cores better than sharing the layers of one image.
    return open_session(graph, session_options(1))
