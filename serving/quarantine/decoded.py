"""Images of the quarantine as the pixels that a model reads."""

from __future__ import annotations

import logging

import numpy as np
from numpy.typing import NDArray

from serving.bundle.errors import ImageError
from serving.bundle.pixels import ANY_SIZE, open_image, to_pixels
from serving.bundle.sections import ImageSpec
from serving.quarantine.records import Item, StoreError, UnavailableError
from serving.quarantine.store import Store

log = logging.getLogger(__name__)


def item_pixels(store: Store, item: Item, spec: ImageSpec) -> NDArray[np.uint8] | None:
    """The pixels of an item; None, with a warning, if its file is missing or damaged.

    Raises an UnavailableError if the quarantine cannot be reached: the image may be there.
    """
    try:
        return to_pixels(open_image(store.image(item.id), ANY_SIZE), spec)
    except UnavailableError:
        raise
    except (ImageError, StoreError) as error:
        log.warning("skipped image %d of the quarantine: %s", item.id, error)
        return None
