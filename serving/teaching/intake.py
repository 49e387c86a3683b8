"""Images that people give as examples: answered as any image is, and stored with a label."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from serving.bundle.decision import FEATURES, decide
from serving.bundle.errors import ImageError
from serving.bundle.pixels import Limits, open_image, to_pixels
from serving.errors import OutputError, refused_image
from serving.inference.job import is_large
from serving.inference.loaded import TRUNK_KEY, LoadedModel
from serving.quarantine.records import Arrival

if TYPE_CHECKING:
    from serving.quarantine.store import Store


_decoding_large = threading.Lock()


class Stored(NamedTuple):
    """An image in the quarantine."""

    id: int
    duplicate: bool
    label_before: str | None
    answer: dict[str, Any]


def store_example(
    store: Store, loaded: LoadedModel, content: bytes, limits: Limits, label: str | None, who: str
) -> Stored:
    """Answer an image, store it unless it is there, and label it; durable when this returns."""
    arrival = answered(loaded, content, limits)
    added = store.add([arrival])
    (item_id,) = added.ids
    (item,) = store.items(ids=[item_id])
    if label is not None:
        store.teach([item_id], label, loaded.model.manifest.labels, who)
    answer = {key: value for key, value in arrival.answer.items() if key != TRUNK_KEY}
    return Stored(item_id, item_id not in added.kept, item.label, answer)


def answered(loaded: LoadedModel, content: bytes, limits: Limits) -> Arrival:
    """An image with its answer and its features; raises a RequestError if it cannot be answered."""
    model = loaded.model
    try:
        image = open_image(content, limits)
        # As with predictions: a large image takes much memory while it is decoded.
        with _decoding_large if is_large(image, len(content)) else contextlib.nullcontext():
            pixels = to_pixels(image, model.manifest.image)
    except ImageError as error:
        raise refused_image(error) from None
    outputs = model.run(pixels[np.newaxis], features=True)
    features = outputs.pop(FEATURES)[0]
    if not all(np.isfinite(values).all() for values in outputs.values()):
        raise OutputError("the network failed on this image", got="NaN or infinity", allowed="finite numbers")
    fields = loaded.formatter.fields(decide(outputs, model.bundle.rule), 0, loaded.default_options)
    return Arrival(content, "example", time.time(), loaded.version, loaded.noted(fields), features.copy())
