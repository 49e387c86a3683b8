"""Encodes images with a trunk, each once per view: vectors are kept in a cache on disk and read from there."""

from __future__ import annotations

import hashlib
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from models.trunks.trunk import OUTPUT, Trunk, TrunkSpec
from serving.bundle.errors import ImageError, ProviderError
from serving.bundle.manifest import INPUT_NAME, Graph, ImageSpec
from serving.bundle.pixels import to_pixels
from serving.bundle.providers import CPU, wants_cuda
from serving.bundle.session import open_cuda_session, open_session, session_options
from training.data.cache import Cache
from training.data.images import Images
from training.data.originals import Original
from training.data.reader import Read, Unreadable
from training.data.records import Records
from training.data.threads import chunked, in_threads

if TYPE_CHECKING:
    import onnxruntime as ort

    from training.show.console import Reporter

CPU_CHUNK, GPU_CHUNK = 8, 64
"""Images that a thread decodes and encodes at a time."""
HUGE = 20_000_000
"""Pixels above which only one image is decoded at a time, to bound memory."""
PIXELS_VERSION = 1
"""Changes whenever the pixels of a photo change, so that vectors of older pixels are not used."""

DAMAGED = "its vector in the cache has just been damaged"

log = logging.getLogger(__name__)


class View(NamedTuple):
    """A name for the cache, and the pixels of an image: uint8 [size, size, 3]."""

    name: str
    pixels: Callable[[Image.Image, ImageSpec], NDArray[np.uint8]]


PLAIN = View("plain", to_pixels)
"""As a server sees the image."""


class _Result(NamedTuple):
    """What a thread found for one image."""

    place: int
    stamp: bytes | None = None
    digest: bytes | None = None
    vector: NDArray[np.float32] | None = None
    """None if the cache has it."""
    problem: str = ""


class Encoder:
    """A trunk that is ready to encode, on the GPU if that works. It keeps the files of the cache open that it uses."""

    def __init__(
        self, trunk: Trunk, *, provider: str = "auto", folder: Path | None = None, reporter: Reporter | None = None
    ) -> None:
        """`folder` is that of the cache, the user's by default; progress is shown by `reporter`, if given."""
        self.trunk = trunk
        self._cache = Cache(folder)
        self._reporter = reporter
        self._threads = max(1, torch.get_num_threads())
        self._session = _session(trunk, provider)
        self._huge = Lock()
        self._used: set[str] = set()

    @property
    def spec(self) -> TrunkSpec:
        return self.trunk.spec

    @property
    def folder(self) -> Path:
        """Where the cache is."""
        return self._cache.folder

    @property
    def image(self) -> ImageSpec:
        """The pixels that the trunk reads."""
        return ImageSpec(height=self.spec.size, width=self.spec.size, mode="RGB")

    @property
    def provider(self) -> str:
        """The provider that really runs the graph."""
        return str(self._session.get_providers()[0])

    def encode(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        """uint8 [n, size, size, 3] -> float32 [n, dim]; nothing is cached."""
        return np.asarray(self._session.run([OUTPUT], {INPUT_NAME: pixels})[0])

    def read(self, originals: Sequence[Original], labels: Sequence[str], view: View = PLAIN) -> Read:
        """The encoded images that could be read, in order, and those that could not."""
        records = self._records(view)
        digests = self._cache.digests_of([_stamp(original) for original in originals])
        rows = records.find([digest or b"" for digest in digests])
        problems: dict[int, str] = {}
        if missing := (rows < 0).nonzero()[0].tolist():
            # Rows of images that were returned before must stay as they are.
            if self._cache.make_room(records, len(missing), restart=view.name not in self._used):
                records, missing = self._records(view), list(range(len(originals)))
                self._cache.make_room(records, len(missing), restart=False)
            for one in self._encode_missing(records, originals, missing, view):
                digests[one.place] = one.digest
                problems[one.place] = one.problem
            rows = records.find([digest or b"" for digest in digests])
        self._used.add(view.name)
        every = np.empty(len(originals), object)
        every[:] = originals
        kept = (rows >= 0).nonzero()[0]
        images = Images(records.rows(np.float32), np.array(labels, dtype=np.str_)[kept], rows[kept], every[kept])
        lost = (rows < 0).nonzero()[0].tolist()
        unreadable = [Unreadable(originals[place].name, problems.get(place, DAMAGED)) for place in lost]
        return Read(images, [digest for place in kept if (digest := digests[place])], unreadable)

    def missing(self, originals: Sequence[Original], view: View = PLAIN) -> int:
        """How many images are not in the cache, or changed since."""
        digests = self._cache.digests_of([_stamp(original) for original in originals])
        return int((self._records(view).find([digest or b"" for digest in digests]) < 0).sum())

    def seconds_per_image(self, originals: Sequence[Original], view: View = PLAIN) -> float:
        """How long an image takes to be decoded and encoded, with all threads at work: measured on these."""
        seconds = []
        for original in originals:
            started = time.perf_counter()
            try:
                self.encode(self._pixels(original, original.content(), view)[None])
            except (ImageError, OSError):
                continue
            seconds.append(time.perf_counter() - started)
        # The first run of a graph allocates memory.
        return statistics.median(seconds[1:] or seconds or [0.0]) / self._threads

    def _records(self, view: View) -> Records:
        about = {"trunk": self.spec.name, "size": self.spec.size, "dim": self.spec.dim, "view": view.name}
        return self._cache.vectors(f"{self.trunk.digest[:32]}-{view.name}-{PIXELS_VERSION}", self.spec.dim, about)

    def _encode_missing(
        self, records: Records, originals: Sequence[Original], missing: Sequence[int], view: View
    ) -> list[_Result]:
        """Add images to the cache, chunk by chunk, so that a killed process loses only a few; vectors are left out."""

        def work(places: Sequence[int]) -> list[_Result]:
            return self._encoded(records, [(place, originals[place]) for place in places], view)

        started, found, encoded = time.monotonic(), list[_Result](), 0
        size = CPU_CHUNK if self.provider == CPU else GPU_CHUNK
        with self._progress(len(missing)) as advance:
            for results in in_threads(self._threads, work, chunked(missing, size)):
                new = {one.digest: one.vector for one in results if one.digest and one.vector is not None}
                if new:
                    self._cache.append(records, list(new), np.stack(list(new.values())))
                encoded += len(new)
                self._cache.note_digests([(one.stamp, one.digest) for one in results if one.digest])
                found += [one._replace(vector=None) for one in results]
                advance(len(results))
        if encoded:
            seconds = time.monotonic() - started
            log.info("encoded %d images with %s on %s in %.1f s", encoded, self.spec.name, self.provider, seconds)
        return found

    def _encoded(self, records: Records, some: Sequence[tuple[int, Original]], view: View) -> list[_Result]:
        """Read, decode and encode a few images; runs in a thread."""
        found, pixels = [], []
        for place, original in some:
            try:
                # Before the content: a file that changes in between gets another stamp.
                stamp, content = original.stamp(), original.content()
                digest = hashlib.sha256(content).digest()
                if records.has(digest):
                    found.append(_Result(place, stamp, digest))
                    continue
                pixels.append(self._pixels(original, content, view))
                found.append(_Result(place, stamp, digest, np.empty(0, np.float32)))
            except (ImageError, OSError) as error:
                found.append(_Result(place, problem=str(error)))
        vectors = iter(self.encode(np.stack(pixels)) if pixels else ())
        return [one if one.vector is None else one._replace(vector=next(vectors)) for one in found]

    def _pixels(self, original: Original, content: bytes, view: View) -> NDArray[np.uint8]:
        image = original.image(content)
        if image.width * image.height <= HUGE:
            return view.pixels(image, self.image)
        with self._huge:
            return view.pixels(image, self.image)

    @contextmanager
    def _progress(self, total: int) -> Iterator[Callable[[int], None]]:
        if self._reporter is None:
            yield lambda count: None
            return
        with self._reporter.counter(f"encoding with {self.spec.name}", total) as advance:
            yield advance


def _session(trunk: Trunk, provider: str) -> ort.InferenceSession:
    graph = Graph(trunk.model, {})
    if wants_cuda(provider):
        probe = np.zeros((1, trunk.spec.size, trunk.spec.size, 3), np.uint8)
        try:
            return open_cuda_session(graph, probe, 1)
        except ProviderError as error:
            if provider == "cuda":
                raise
            log.warning("%s; the CPU is used", error)
    # Each thread encodes its own images, which uses the cores better than sharing the layers of one image.
    return open_session(graph, session_options(1))


def _stamp(original: Original) -> bytes | None:
    try:
        return original.stamp()
    except OSError:
        return None  # reading it will fail, with the reason
