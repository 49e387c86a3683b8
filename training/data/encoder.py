"""Encodes images with a trunk, each once per view: vectors are kept in a cache on disk and read from there."""

from __future__ import annotations

import hashlib
import json
import logging
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from models.trunks.trunk import OUTPUT, Trunk, TrunkSpec
from serving.bundle.atomic import replace_file
from serving.bundle.errors import ImageError, ProviderError
from serving.bundle.manifest import INPUT_NAME, Graph, ImageSpec
from serving.bundle.pixels import to_pixels
from serving.bundle.providers import CPU, wants_cuda
from serving.bundle.session import open_cuda_session, open_session, session_options
from training.data.cache import ABOUT, DIGESTS, FOLDER_VARIABLE, VECTORS, cache_folder, make_room
from training.data.images import DataError, Images
from training.data.originals import Original
from training.data.reader import Read, Unreadable
from training.data.records import KEY, Records
from training.show.console import Reporter

CPU_CHUNK, GPU_CHUNK = 8, 64
"""Images that a thread decodes and encodes at a time."""
HASHED = 64
"""Files that a thread reads at a time to compute their digests."""
PIXELS_VERSION = 1
"""Changes whenever the pixels of a photo change, so that vectors of older pixels are not used."""

if TYPE_CHECKING:
    import onnxruntime as ort

Given = TypeVar("Given")
Made = TypeVar("Made")

log = logging.getLogger(__name__)


class View(NamedTuple):
    """A name for the cache, and the pixels of an image: uint8 [size, size, 3]."""

    name: str
    pixels: Callable[[Image.Image, ImageSpec], NDArray[np.uint8]]


PLAIN = View("plain", to_pixels)
"""As a server sees the image."""


class Encoder:
    """A trunk that is ready to encode, on the GPU if that works."""

    def __init__(
        self, trunk: Trunk, *, provider: str = "auto", folder: Path | None = None, reporter: Reporter | None = None
    ) -> None:
        """`folder` is that of the cache, the user's by default; progress is shown by `reporter`, if given."""
        self.trunk = trunk
        self.folder = folder or cache_folder()
        self._reporter = reporter
        self._threads = max(1, torch.get_num_threads())
        self._session = _session(trunk, provider)

    @property
    def spec(self) -> TrunkSpec:
        return self.trunk.spec

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
        reasons: dict[int, str] = {}
        digests = self._digests(originals, reasons)
        with closing(self._records(view, len(set(digests)))) as records:
            rows = records.find([digest or b"" for digest in digests])
            # Copies of an image are encoded once.
            missing = {digest: place for place, digest in enumerate(digests) if digest and rows[place] < 0}
            if missing:
                self._encode_into(records, originals, missing, view, reasons)
                rows = records.find([digest or b"" for digest in digests])
            vectors = records.rows(np.float32)
        every = np.empty(len(originals), object)
        every[:] = originals
        kept = (rows >= 0).nonzero()[0]
        images = Images(vectors, np.array(labels, dtype=np.str_)[kept], rows[kept], every[kept])
        unreadable = [
            Unreadable(originals[place].name, reasons.get(place, "a copy of an image that cannot be read"))
            for place in (rows < 0).nonzero()[0].tolist()
        ]
        return Read(images, [digest for place in kept if (digest := digests[place])], unreadable)

    def missing(self, originals: Sequence[Original], view: View = PLAIN) -> int:
        """How many different images are not in the cache yet."""
        digests = self._digests(originals, {})
        with closing(self._records(view, 0)) as records:
            rows = records.find([digest or b"" for digest in digests])
        return len({digest for digest, row in zip(digests, rows, strict=True) if digest and row < 0})

    def seconds_per_image(self, originals: Sequence[Original], view: View = PLAIN) -> float:
        """How long an image takes to be decoded and encoded, with all threads at work: measured on these."""
        seconds = []
        for original in originals:
            started = time.perf_counter()
            try:
                self.encode(view.pixels(original.image(original.content()), self.image)[None])
            except (ImageError, OSError):
                continue
            seconds.append(time.perf_counter() - started)
        # The first run of a graph allocates memory.
        return statistics.median(seconds[1:] or seconds or [0.0]) / self._threads

    def _records(self, view: View, images: int) -> Records:
        """The vectors of this trunk and view, with room for those of so many images."""
        folder = self.folder / VECTORS / f"{self.trunk.digest[:32]}-{view.name}-{PIXELS_VERSION}"
        width = self.spec.dim * np.dtype(np.float32).itemsize
        make_room(self.folder, folder, images * width)
        records = self._opened(folder, width)
        about = {"trunk": self.spec.name, "size": self.spec.size, "dim": self.spec.dim, "view": view.name}
        replace_file(folder / ABOUT, json.dumps(about).encode(), durable=False)
        return records

    def _digests(self, originals: Sequence[Original], reasons: dict[int, str]) -> list[bytes | None]:
        """The sha256 of each content, or None if it cannot be read; files that did not change are not read again."""
        stamps = [_stamp(original) for original in originals]
        with closing(self._opened(self.folder / DIGESTS, KEY)) as records:
            rows = records.find([stamp or b"" for stamp in stamps])
            known = records.rows(np.uint8)
            digests: list[bytes | None] = [known[row].tobytes() if row >= 0 else None for row in rows]

            def work(chunk: Sequence[int]) -> list[tuple[int, bytes]]:
                found = []
                for place in chunk:
                    try:
                        found.append((place, hashlib.sha256(originals[place].content()).digest()))
                    except OSError as error:
                        reasons[place] = str(error)
                return found

            missing = [place for place, digest in enumerate(digests) if digest is None]
            for found in self._in_threads(work, _chunks(missing, HASHED)):
                for place, digest in found:
                    digests[place] = digest
                stamped = [(stamp, digest) for place, digest in found if (stamp := stamps[place]) is not None]
                values = np.frombuffer(b"".join(digest for _, digest in stamped), np.uint8)
                self._append(records, [stamp for stamp, _ in stamped], values)
        return digests

    def _encode_into(
        self,
        records: Records,
        originals: Sequence[Original],
        missing: Mapping[bytes, int],
        view: View,
        reasons: dict[int, str],
    ) -> None:
        """Encode the missing images and add them to the cache, chunk by chunk: a killed process loses a few chunks."""

        def work(chunk: Sequence[bytes]) -> tuple[list[bytes], list[NDArray[np.float32]], int]:
            pixels: dict[bytes, NDArray[np.uint8]] = {}
            for digest in chunk:
                original = originals[missing[digest]]
                try:
                    pixels[digest] = view.pixels(original.image(original.content()), self.image)
                except (ImageError, OSError) as error:
                    reasons[missing[digest]] = str(error)
            return list(pixels), [self.encode(np.stack(list(pixels.values())))] if pixels else [], len(chunk)

        started, total = time.monotonic(), len(missing)
        chunk = CPU_CHUNK if self.provider == CPU else GPU_CHUNK
        with self._progress(total) as advance:
            for digests, vectors, count in self._in_threads(work, _chunks(list(missing), chunk)):
                for encoded in vectors:
                    self._append(records, digests, encoded)
                advance(count)
        seconds = time.monotonic() - started
        log.info("encoded %d images with %s on %s in %.1f s", total, self.spec.name, self.provider, seconds)

    def _opened(self, folder: Path, width: int) -> Records:
        try:
            return Records(folder, width)
        except OSError as error:
            raise self._unusable(error) from error

    def _append(self, records: Records, keys: Sequence[bytes], values: NDArray[Any]) -> None:
        try:
            records.append(keys, values)
        except OSError as error:
            raise self._unusable(error) from error

    def _unusable(self, error: OSError) -> DataError:
        return DataError(
            f"the cache {self.folder} cannot be used ({error.strerror}); "
            f"allowed: a writable folder with room, named by {FOLDER_VARIABLE}"
        )

    @contextmanager
    def _progress(self, total: int) -> Iterator[Callable[[int], None]]:
        if self._reporter is None:
            yield lambda count: None
            return
        with self._reporter.counter(f"encoding with {self.spec.name}", total) as advance:
            yield advance

    def _in_threads(self, work: Callable[[Given], Made], items: Iterable[Given]) -> Iterator[Made]:
        """The results in any order; only a few items are in work at a time."""
        waiting = iter(items)
        with ThreadPoolExecutor(self._threads) as pool:
            running: set[Future[Made]] = {pool.submit(work, item) for item in islice(waiting, 2 * self._threads)}
            try:
                while running:
                    finished, running = wait(running, return_when=FIRST_COMPLETED)
                    for future in finished:
                        yield future.result()
                    running |= {pool.submit(work, item) for item in islice(waiting, len(finished))}
            finally:
                pool.shutdown(wait=True, cancel_futures=True)


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


def _chunks(items: Sequence[Given], size: int) -> Iterator[Sequence[Given]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _stamp(original: Original) -> bytes | None:
    try:
        return original.stamp()
    except OSError:
        return None  # reading it will fail, with the reason
