"""Twenty trained tasks in minutes: scikit-learn's digits 0 to 7 in five guises, two classes per task."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from training import fit
from training.data.datasets import SOURCES
from training.data.images import Images, Source, join
from training.data.reader import Reader
from training.presets import PRESETS

NAME = "digits in guises"
STRIPE = 130


def _striped(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    rows = np.arange(pixels.shape[1]) % 4 < 2
    return np.maximum(pixels, np.where(rows, STRIPE, 0).astype(np.uint8)[:, None, None])


def _tilted(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    turned = [Image.fromarray(image[:, :, 0]).rotate(45, Image.Resampling.BILINEAR) for image in pixels]
    return np.stack([np.asarray(image) for image in turned])[..., None]


GUISES: dict[str, Callable[[NDArray[np.uint8]], NDArray[np.uint8]]] = {
    "plain": lambda pixels: pixels,
    "negative": lambda pixels: 255 - pixels,
    "striped": _striped,
    "tilted": _tilted,
    "transposed": lambda pixels: pixels.transpose(0, 2, 1, 3),
}


def guised_digits(reader: Reader, data: str | None = None) -> Source:
    """Fifty classes, such as "7 striped"."""
    plain = SOURCES["digits"](reader, data)

    def guised(images: Images) -> Images:
        parts = [Images(guise(images.pixels), np.char.add(images.labels, f" {name}")) for name, guise in GUISES.items()]
        return join(parts)

    classes = tuple(f"{digit} {name}" for name in GUISES for digit in plain.classes)
    return Source(guised(plain.train), guised(plain.test), classes)


@contextmanager
def guises_known() -> Iterator[None]:
    """Within this, `digits` is the preset for 0 to 7 in all guises, with fewer epochs."""
    digits = PRESETS["digits"]
    preset = replace(
        digits,
        dataset=NAME,
        held_out=tuple(f"{digit} {guise}" for guise in GUISES for digit in (8, 9)),
        features=replace(digits.features, epochs=6, warmup_epochs=1),
        head=replace(digits.head, epochs=6),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "digits", preset)
        patch.setitem(SOURCES, NAME, guised_digits)
        yield


def learn_twenty_tasks(folder: Path) -> None:
    """A finished run; needs `guises_known`."""
    assert fit.main(["--out", str(folder)]) == 0
