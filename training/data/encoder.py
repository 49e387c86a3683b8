"""Encodes images with a trunk, each once per view: vectors are kept in a cache on disk and read from there."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from models.trunks.trunk import Trunk, TrunkSpec
from serving.bundle.errors import ImageError
from serving.bundle.providers import CPU
from serving.bundle.sections import ImageSpec
from training.data.cache import Cache
from training.data.cluster_encoder import ClusterEncoder
from training.data.image_encoder import (
    PLAIN,
    Encoded,
    ImageEncoder,
    View,
    chunk_size,
    open_trunk_session,
    run_session,
)
from training.data.images import DataError, Images
from training.data.originals import Original
from training.data.reader import Read, Unreadable
from training.data.records import Records
from training.data.threads import chunked, in_threads
from training.data.trunk_check import check_trunk

if TYPE_CHECKING:
    from training.show.console import Reporter

PIXELS_VERSION = 1
"""Changes whenever the pixels of a photo change, so that vectors of older pixels are not used."""

DAMAGED = "its vector in the cache has just been damaged"

log = logging.getLogger(__name__)


class Encoder:
    """A trunk that is ready to encode, on the GPU if that works. It keeps the files of the cache open that it uses."""

    def __init__(
        self,
        trunk: Trunk,
        *,
        provider: str = "auto",
        folder: Path | None = None,
        reporter: Reporter | None = None,
        ray: bool = False,
    ) -> None:
        """`folder` is that of the cache, the user's by default; progress is shown by `reporter`, if given. With `ray`,
        images that are read are encoded on a Ray cluster."""
        self.trunk = trunk
        self._cache = Cache(folder)
        self._reporter = reporter
        self._threads = max(1, torch.get_num_threads())
        self._session = open_trunk_session(trunk.model, trunk.spec.size, provider)
        check_trunk(trunk, partial(run_session, self._session))
        self._images = ImageEncoder(self.image, lambda pixels: self.encode(pixels))
        self._cluster = ClusterEncoder(trunk, provider) if ray else None
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
        return run_session(self._session, pixels)

    def read(
        self, originals: Sequence[Original], labels: Sequence[str], view: View = PLAIN, name: str | None = None
    ) -> Read:
        """The encoded images that could be read, in order, and those that could not; `name` is shown as progress."""
        records = self._records(view)
        digests = self._cache.digests_of([_stamp(original) for original in originals])
        rows = records.find([digest or b"" for digest in digests])
        problems: dict[int, str] = {}
        if missing := (rows < 0).nonzero()[0].tolist():
            # Rows of images that were returned before must stay as they are.
            if self._cache.make_room(records, len(missing), restart=view.name not in self._used):
                records, missing = self._records(view), list(range(len(originals)))
                self._cache.make_room(records, len(missing), restart=False)
            name = name or f"encoding with {self.spec.public_name}"
            for one in self._encode_missing(records, originals, missing, view, name):
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

    def views(self, images: Images, view: View, name: str | None = None) -> Images:
        """Encoded images in another view, with its vectors side by side in each row; raises a DataError if one of
        them cannot be read again."""
        assert images.originals is not None
        read = self.read(list(images.originals), images.labels.tolist(), view, name)
        if read.unreadable:
            first, reason = read.unreadable[0]
            lost = f"{len(read.unreadable)} of {len(images)} images are gone or damaged"
            raise DataError(f"{first} cannot be read again ({reason}); {lost}")
        return read.images

    def missing(self, originals: Sequence[Original], view: View = PLAIN) -> int:
        """How many images are not in the cache, or changed since."""
        digests = self._cache.digests_of([_stamp(original) for original in originals])
        return int((self._records(view).find([digest or b"" for digest in digests]) < 0).sum())

    def seconds_per_image(self, originals: Sequence[Original], view: View = PLAIN) -> float:
        """How long an image takes to be decoded and encoded, with all threads, or the whole cluster, at work:
        measured on these."""
        seconds = []
        for original in originals:
            started = time.perf_counter()
            try:
                self.encode(self._images.pixels(original, original.content(), view))
            except (ImageError, OSError):
                continue
            seconds.append(time.perf_counter() - started)
        # The first run of a graph allocates memory.
        return statistics.median(seconds[1:] or seconds or [0.0]) / (
            self._cluster.actors if self._cluster else self._threads
        )

    def _records(self, view: View) -> Records:
        about = {"trunk": self.spec.name, "size": self.spec.size, "dim": self.spec.dim, "view": view.name}
        name = f"{self.trunk.digest[:32]}-{view.name}-{PIXELS_VERSION}"
        return self._cache.vectors(name, view.vectors * self.spec.dim, about)

    def _encode_missing(
        self, records: Records, originals: Sequence[Original], missing: Sequence[int], view: View, name: str
    ) -> list[Encoded]:
        """Add images to the cache, chunk by chunk, so that a killed process loses only a few; vectors are left out."""
        started, found, encoded = time.monotonic(), list[Encoded](), 0
        with self._progress(name, len(missing)) as advance:
            for results in self._computed(records, originals, missing, view):
                vectors = {one.digest: one.vector for one in results if one.digest and one.vector is not None}
                # A copy of an image may have been encoded meanwhile.
                if new := {digest: vector for digest, vector in vectors.items() if not records.has(digest)}:
                    self._cache.append(records, list(new), np.stack(list(new.values())))
                encoded += len(new)
                self._cache.note_digests([(one.stamp, one.digest) for one in results if one.digest])
                found += [one._replace(vector=None) for one in results]
                advance(len(results))
        if encoded:
            seconds, where = time.monotonic() - started, self._cluster.name if self._cluster else self.provider
            what = "images" if view.vectors == 1 else f"images in {view.vectors} views each"
            log.info("encoded %d %s with %s on %s in %.1f s", encoded, what, self.spec.name, where, seconds)
        return found

    def _computed(
        self, records: Records, originals: Sequence[Original], missing: Sequence[int], view: View
    ) -> Iterator[list[Encoded]]:
        """Read, decode and encode images in threads, or on a cluster; a few at a time, in any order."""
        if self._cluster is not None:
            return self._cluster.encoded(originals, missing, view)

        def work(places: Sequence[int]) -> list[Encoded]:
            return self._images.encoded([(place, originals[place]) for place in places], view, records.has)

        return in_threads(self._threads, work, chunked(missing, chunk_size(view, gpu=self.provider != CPU)))

    @contextmanager
    def _progress(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        if self._reporter is None:
            yield lambda count: None
            return
        with self._reporter.counter(name, total) as advance:
            yield advance


def _stamp(original: Original) -> bytes | None:
    try:
        return original.stamp()
    except OSError:
        return None  # reading it will fail, with the reason
