"""Graphs of networks that torch has exported, kept on disk: an export takes many seconds."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable

from models.trunks.cache_settings import cache_folder
from models.trunks.wrapped import Wrapped
from serving.bundle.atomic import replacing

GRAPHS = "graphs"


def stored(key: dict[str, object], make: Callable[[], Wrapped]) -> Wrapped:
    """The graph for a key: as it was stored, or made now and stored. A damaged file counts as missing."""
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    file = cache_folder() / GRAPHS / f"{name}.onnx"
    # A cache that cannot be read or written costs time, and no more.
    with contextlib.suppress(OSError, ValueError, KeyError):
        header, _, model = file.read_bytes().partition(b"\n")
        found = json.loads(header)
        if hashlib.sha256(model).hexdigest() == found["sha256"]:
            return Wrapped(model, tuple(found["depths"]), tuple(found["outputs"]))
    made = make()
    about = {"sha256": hashlib.sha256(made.model).hexdigest(), "depths": made.depths, "outputs": made.outputs}
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file, durable=False, shared=True) as written:
            written.write_bytes(json.dumps(about).encode() + b"\n" + made.model)
    return made
