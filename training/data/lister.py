"""Lists the images of a source, and how they are divided, before there is a trunk to encode them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch

from serving.bundle.errors import ImageError
from serving.bundle.pixels import to_pixels
from serving.bundle.sections import ImageSpec
from training.data.images import Images
from training.data.originals import Original
from training.data.reader import Read, Unreadable
from training.data.threads import chunked, in_threads
from training.show.console import Reporter

CHUNK = 64


class Finder:
    """Assumes that every image is readable and opens none: counts the images before any work is done."""

    def read(self, originals: Sequence[Original], labels: Sequence[str]) -> Read:
        images = _listed(originals, labels, range(len(originals)))
        return Read(images, [str(number).encode() for number in range(len(originals))], [])


class Lister:
    """Decodes every image as an encoder would, and keeps its location instead of its pixels.

    An encoder finds the same images in the same order with the same digests, so both divide them alike.
    """

    def __init__(self, spec: ImageSpec, reporter: Reporter) -> None:
        self._spec = spec
        self._reporter = reporter

    def read(self, originals: Sequence[Original], labels: Sequence[str]) -> Read:
        found: dict[int, bytes | str] = {}

        def work(chunk: Sequence[int]) -> dict[int, bytes | str]:
            return {place: self._digest(originals[place]) for place in chunk}

        with self._reporter.counter("reading images", len(originals)) as advance:
            threads, places = max(1, torch.get_num_threads()), chunked(range(len(originals)), CHUNK)
            for some in in_threads(threads, work, places):
                found |= some
                advance(len(some))
        kept, digests, unreadable = list[int](), list[bytes](), list[Unreadable]()
        for place, each in sorted(found.items()):
            if isinstance(each, bytes):
                kept.append(place)
                digests.append(each)
            else:
                unreadable.append(Unreadable(originals[place].name, each))
        return Read(_listed(originals, labels, kept), digests, unreadable)

    def _digest(self, original: Original) -> bytes | str:
        """The sha256 of an image, or why it cannot be read."""
        try:
            content = original.content()
            to_pixels(original.image(content), self._spec)
        except (ImageError, OSError) as error:
            return str(error)
        return hashlib.sha256(content).digest()


def _listed(originals: Sequence[Original], labels: Sequence[str], kept: Sequence[int]) -> Images:
    """Where some images are, without their pixels."""
    every = np.empty(len(originals), object)
    every[:] = originals
    index = np.array(kept, int)
    nothing = np.empty((len(kept), 0), np.float32)
    return Images(nothing, np.array(labels, dtype=np.str_)[index], np.arange(len(kept)), every[index])
