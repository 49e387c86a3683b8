"""Encoding on a Ray cluster: actors read, decode and encode; this process keeps the cache. Needs no torch."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from models.trunks.trunk import Trunk
from serving.bundle.cluster import Cluster, ClusterError, resolved
from serving.bundle.sections import ImageSpec
from training.data.image_encoder import Encoded, ImageEncoder, Place, View, chunk_size, open_trunk_session, run_session
from training.data.images import DataError
from training.data.originals import Original
from training.data.threads import chunked

CHUNKS = 8
"""Chunks of images that an actor gets at a time, so that sending them costs little."""


class _Encoding:
    """Opens the trunk once, and encodes one lot of images after another."""

    def __init__(self, model: Any, size: int, provider: str) -> None:
        session = open_trunk_session(resolved(model), size, provider)
        self._gpu = provider == "cuda"
        self._encoder = ImageEncoder(ImageSpec(height=size, width=size, mode="RGB"), partial(run_session, session))

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        some: list[Place]
        view: View
        some, view = pickle.loads(row["images"])
        parts = chunked(some, chunk_size(view, gpu=self._gpu))
        found = [one for part in parts for one in self._encoder.encoded(part, view, lambda digest: False)]
        return {"encoded": pickle.dumps(found)}


class ClusterEncoder:
    """A trunk on all processors of a cluster, or on its GPUs if it has any."""

    def __init__(self, trunk: Trunk, provider: str) -> None:
        """Raises a DataError if there is no cluster."""
        try:
            self._cluster = Cluster()
        except ClusterError as error:
            raise DataError(str(error)) from error
        self._gpus = provider != "cpu" and self._cluster.processors(gpus=True) > 0
        self._arguments = (
            self._cluster.shared(trunk.model),
            trunk.spec.size,
            "cuda" if self._gpus else "cpu",
        )

    @property
    def name(self) -> str:
        """What encodes, for messages."""
        return f"{self.actors} {'GPUs' if self._gpus else 'processors'} of a Ray cluster"

    @property
    def actors(self) -> int:
        """How many images are decoded and encoded at a time."""
        return max(1, self._cluster.processors(gpus=self._gpus))

    def encoded(self, originals: Sequence[Original], places: Sequence[int], view: View) -> Iterator[list[Encoded]]:
        """The vectors of the originals at these places, in any order; a file must have the same path everywhere."""
        lots = chunked(places, CHUNKS * chunk_size(view, gpu=self._gpus))
        rows = ({"images": pickle.dumps(([(place, originals[place]) for place in lot], view))} for lot in lots)
        try:
            for row in self._cluster.map(_Encoding, self._arguments, rows, actors=self.actors, gpus=self._gpus):
                yield pickle.loads(row["encoded"])
        except ClusterError as error:
            raise DataError(str(error)) from error
