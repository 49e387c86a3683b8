"""Whether the graph of a trunk computes what it must, before thousands of photos are encoded with it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from models.trunks.trunk import Trunk, TrunkError

ALLOWED = 1e-3
"""The largest difference of a number of an encoded vector, which has length 1."""

Encode = Callable[[NDArray[np.uint8]], NDArray[np.float32]]


def check_trunk(trunk: Trunk, encode: Encode) -> None:
    """Encode a few images; raises a TrunkError unless an image gets one finite vector, the same alone and in a batch,
    and the one that the network had before it was exported."""
    spec, probe = trunk.spec, trunk.probe
    pixels = _images(spec.size) if probe is None else probe.pixels
    try:
        alone, together = encode(pixels[:1]), encode(pixels)
    except Exception as error:
        # onnxruntime's exceptions have no common base class of their own.
        reason = " ".join(str(error).split())[:600]
        raise TrunkError(
            f"trunk {spec.name}: it does not run with batches of 1 and {len(pixels)} images of {spec.size} x "
            f"{spec.size} pixels ({reason}); allowed: operators that onnxruntime knows, and a batch of any length"
        ) from error
    for vectors, count in ((alone, 1), (together, len(pixels))):
        if vectors.shape != (count, spec.dim):
            raise TrunkError(
                f"trunk {spec.name}: {count} images are encoded to {vectors.shape}; needed {(count, spec.dim)}"
            )
        if not np.isfinite(vectors).all():
            raise TrunkError(f"trunk {spec.name}: encoded vectors are not finite; is the normalisation right?")
    if not (worst := float(np.abs(together[:1] - alone).max())) <= ALLOWED:
        raise TrunkError(
            f"trunk {spec.name}: an image gets another vector in a batch than alone (difference {worst:.2g}); allowed: "
            "a network that is exported for inference, without statistics over a batch"
        )
    if float(np.abs(together[0] - together[-1]).max()) == 0:
        raise TrunkError(f"trunk {spec.name}: different images get the same vector; is the normalisation right?")
    if probe is not None and not (worst := float(np.abs(together - probe.encoded).max())) <= ALLOWED:
        raise TrunkError(
            f"trunk {spec.name}: the exported graph differs from the network in torch by {worst:.2g} > {ALLOWED:g}; "
            "allowed: another --size, another network, or onnx:FILE"
        )


def _images(size: int) -> NDArray[np.uint8]:
    """Two images with edges and colours, the same each time."""
    coarse = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 3), dtype=np.uint8)
    places = np.arange(size) * 8 // size
    return np.ascontiguousarray(coarse[:, places][:, :, places])
