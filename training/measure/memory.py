"""What a run stores about the images of its tasks instead of the images, and how much the images would be."""

from __future__ import annotations

import math
from typing import TypedDict

from training.run import Run


class MemoryUse(TypedDict):
    """Bytes, and numbers of images at the size in which the run reads them."""

    detectors_bytes: int
    """The memory of the detectors of all tasks: what the scores were fitted to, and measurements of own images."""
    training_images: int
    training_images_bytes: int
    buffer_images: int
    """The number of images that --buffer stores by default; 0 if a run of this kind cannot store any."""
    buffer_bytes: int


def memory_use(run: Run) -> MemoryUse:
    preset = run.config.preset
    one = math.prod(preset.image.shape)
    if run.network is None:
        pooled = run.need_pooled()
        parts = [pooled.model.classifier.to_arrays(), *(each.to_arrays() for each in pooled.detectors)]
        detectors = sum(values.nbytes for part in parts for values in part.values())
        images = pooled.images
    else:
        fitted = [run.network.detector(task) for task in range(len(run.config.tasks))]
        detectors = sum(values.nbytes for detector in fitted for values in detector.buffers())
        images = sum(int(detector.class_images.sum()) for detector in fitted)
    stored = 0 if run.config.trunk is not None else preset.buffer
    return MemoryUse(
        detectors_bytes=detectors,
        training_images=images,
        training_images_bytes=images * one,
        buffer_images=stored,
        buffer_bytes=stored * one,
    )


def memory_in_words(use: MemoryUse) -> str:
    """One sentence: no image is stored, and what is stored is not always less."""
    buffer = f"{use['buffer_images']:,} stored images (--buffer) would take {_kilobytes(use['buffer_bytes'])}, "
    return (
        "fitted numbers about the images of all tasks, and no image; "
        f"{buffer if use['buffer_images'] else ''}all {use['training_images']:,} training images "
        f"{_kilobytes(use['training_images_bytes'])}"
    )


def _kilobytes(size: int) -> str:
    return f"{size / 1e3:,.0f} kB"
