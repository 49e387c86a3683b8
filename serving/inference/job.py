"""One image on its way to an answer, and how a batch of images is answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL.Image import Image
from pydantic_core import to_json

from serving.bundle.decision import FEATURES, OUTPUT_NAMES, decide
from serving.bundle.pixels import LARGE, Limits, decoding_work, open_image, to_pixels
from serving.errors import OutputError, RequestError
from serving.inference.answers import PredictionOptions, explained
from serving.inference.loaded import LoadedModel

LARGE_FILE = 1024 * 1024
"""Bytes above which a file counts as a large image too: decoding takes up to a megabyte of memory per 64 thousand
pixels, and up to a second."""

FEW_PIXELS = 4096
"""Pixels that the brightness of an image is computed from."""

ReadImage = Callable[[], bytes]
"""Returns the bytes of an image file, or raises a RequestError; called in a thread."""


@dataclass(slots=True, eq=False)
class Job:
    """One image, from the queue to its answer."""

    read: ReadImage
    options: PredictionOptions
    loaded: LoadedModel
    done: asyncio.Future[str]
    request_id: str | None = None
    images: int = 1
    """The number of images in its request."""
    content: bytes | None = None
    image: Image | None = None
    work: int = 0
    """The work of decoding, in pixels, estimated from the header of the image file."""
    large: bool = False
    """Whether decoding takes so much time and memory that only one such image is decoded at a time."""
    brightness: float = 0.0
    """The mean pixel, 0 to 255."""
    features: NDArray[np.float32] | None = None
    pixels: NDArray[np.uint8] | None = None  # [1, height, width, channels]
    fields: dict[str, Any] | None = None
    queued_at: float = field(default_factory=time.perf_counter)
    decode_seconds: float = 0.0
    queue_seconds: float = 0.0
    inference_seconds: float = 0.0

    @property
    def abandoned(self) -> bool:
        """Whether the answer is no longer needed: the deadline passed, or the client disconnected."""
        return self.done.done()

    @property
    def explains(self) -> bool:
        """Whether the graph must run once more, with feature maps."""
        return self.options.explain != "false"

    def open(self, limits: Limits, *, keep_content: bool) -> None:
        """Read the image file's header, or raise an ImageError; `keep_content` keeps the file for the quarantine."""
        started = time.perf_counter()
        self.queue_seconds = started - self.queued_at
        content = self.read()
        self.image = open_image(content, limits)
        self.work = decoding_work(self.image)
        self.large = is_large(self.image, len(content))
        if keep_content:
            self.content = content
        self.queued_at = time.perf_counter()
        self.decode_seconds = self.queued_at - started

    def decode(self) -> None:
        """Decode the pixels, or raise an ImageError."""
        started = time.perf_counter()
        self.queue_seconds += started - self.queued_at
        image, self.image = self.image, None
        assert image is not None
        self.pixels = to_pixels(image, self.loaded.model.manifest.image)[np.newaxis]
        self.queued_at = time.perf_counter()
        self.decode_seconds += self.queued_at - started


def answer_batch(batch: list[Job], *, features: bool) -> list[str | RequestError]:
    """The answer of each job as JSON, or its error; all jobs have the same loaded model.

    `features` are needed only for the quarantine, and cost time.
    """
    started = time.perf_counter()
    loaded = batch[0].loaded
    pixels = np.concatenate([job.pixels for job in batch if job.pixels is not None])
    outputs = loaded.model.run(pixels, features=True) if features else loaded.model.run(pixels)
    all_features = outputs.pop(FEATURES, None)
    # Some thousand pixels are enough.
    flat = pixels.reshape(len(pixels), -1)
    brightness = flat[:, :: 1 + flat.shape[1] // FEW_PIXELS].mean(axis=1).tolist()
    finite = np.isfinite(np.concatenate([outputs[name] for name in OUTPUT_NAMES], axis=1)).all(axis=1).tolist()
    answers: list[str | RequestError] = ["" if good else _not_finite() for good in finite]
    for (alpha, task), rows in _by_decision(batch, finite).items():
        selected = outputs if len(rows) == len(batch) else {name: values[rows] for name, values in outputs.items()}
        verdicts = decide(selected, loaded.model.bundle.rule, alpha=alpha, given_task=task)
        for row, place in enumerate(rows):
            job = batch[place]
            job.brightness = brightness[place]
            job.fields = loaded.formatter.fields(verdicts, row, job.options)
            if job.explains and job.pixels is not None:
                # Such a job is a batch of one, so it neither delays nor fails other jobs.
                explanation = explained(loaded.model, job.pixels, job.fields, job.options.explain)
                job.fields["explanation"] = explanation
            # Several times as fast as Python's own encoder, with the same digits.
            answers[place] = to_json(job.fields).decode()
            if all_features is not None:
                job.features = all_features[place]
    seconds = time.perf_counter() - started
    for job in batch:
        job.queue_seconds += started - job.queued_at
        job.inference_seconds = seconds
    return answers


def is_large(image: Image, size: int) -> bool:
    """Whether an opened image, from a file of this size in bytes, takes so long that only one is decoded at a time."""
    return decoding_work(image) > LARGE or size > LARGE_FILE


def _not_finite() -> OutputError:
    return OutputError("the network failed on this image", got="NaN or infinity", allowed="finite numbers")


def _by_decision(batch: list[Job], finite: list[bool]) -> dict[tuple[float, int | None], list[int]]:
    """Places in a batch that can be decided together, by alpha and task."""
    places: dict[tuple[float, int | None], list[int]] = {}
    for place, job in enumerate(batch):
        if finite[place]:
            places.setdefault((job.options.alpha, job.options.task), []).append(place)
    return places
