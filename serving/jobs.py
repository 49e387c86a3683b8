"""One image on its way to an answer, and how a batch of them is answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL.Image import Image
from pydantic_core import to_json

from serving.answer import Question
from serving.decision import FEATURES, OUTPUT_NAMES, decide
from serving.errors import OutputError, RequestError
from serving.preprocess import Limits, open_image, to_pixels
from serving.served import Served

LARGE = 1_000_000
"""Pixels: a larger image may take a megabyte of memory for every 64 thousand of them while it is decoded."""


class Job:
    """One image on its way to an answer."""

    __slots__ = (
        "arrived",
        "content",
        "decoding",
        "done",
        "features",
        "fields",
        "image",
        "inference",
        "pixels",
        "question",
        "queued",
        "read",
        "request_id",
        "served",
        "waited",
    )

    def __init__(
        self,
        read: Callable[[], bytes],
        question: Question,
        served: Served,
        done: asyncio.Future[str],
        request_id: str | None = None,
    ) -> None:
        self.read = read
        self.question = question
        self.served = served
        self.done = done
        self.request_id = request_id
        self.content: bytes | None = None
        self.image: Image | None = None
        self.features: NDArray[np.float32] | None = None
        self.pixels: NDArray[np.uint8] | None = None  # [1, height, width, channels]
        self.fields: dict[str, Any] | None = None
        self.arrived = self.queued = time.perf_counter()
        self.decoding = self.waited = self.inference = 0.0

    @property
    def abandoned(self) -> bool:
        """Whether nobody waits for the answer any more: the deadline passed, or the client went away."""
        return self.done.done()

    def open(self, limits: Limits, *, keep: bool) -> None:
        """From the request to the head of an image, or a RequestError; `keep` the file for those who want it."""
        started = time.perf_counter()
        self.waited = started - self.arrived
        content = self.read()
        self.image = open_image(content, limits)
        if keep:
            self.content = content
        self.queued = time.perf_counter()
        self.decoding = self.queued - started

    @property
    def large(self) -> bool:
        """Whether the pixels take so much memory that only one such image is decoded at a time."""
        return self.image is not None and self.image.width * self.image.height > LARGE

    def decode(self) -> None:
        """From the head to pixels, or a RequestError."""
        started = time.perf_counter()
        self.waited += started - self.queued
        image, self.image = self.image, None
        assert image is not None
        self.pixels = to_pixels(image, self.served.model.manifest.image)[np.newaxis]
        self.queued = time.perf_counter()
        self.decoding += self.queued - started


def answer(batch: list[Job], *, features: bool) -> list[str | RequestError]:
    """An answer for each, as JSON, or what is wrong with it; all are of one model. Notes how long it took.

    `features` cost time, and nobody but the keeper looks at them.
    """
    started = time.perf_counter()
    served = batch[0].served
    pixels = np.concatenate([job.pixels for job in batch if job.pixels is not None])
    outputs = served.model.run(pixels, features=True) if features else served.model.run(pixels)
    kept = outputs.pop(FEATURES, None)
    finite = np.isfinite(np.concatenate([outputs[name] for name in OUTPUT_NAMES], axis=1)).all(axis=1).tolist()
    said: list[str | RequestError] = ["" if good else _not_finite() for good in finite]
    for question, rows in _by_decision(batch, finite).items():
        same = outputs if len(rows) == len(batch) else {name: values[rows] for name, values in outputs.items()}
        verdicts = decide(same, served.model.bundle.rule, alpha=question[0], given_task=question[1])
        for row, place in enumerate(rows):
            job = batch[place]
            job.fields = served.wording.answer(verdicts, row, job.question)
            # Several times as fast as Python's own encoder, to the same digits.
            said[place] = to_json(job.fields).decode()
            if kept is not None:
                job.features = kept[place]
    seconds = time.perf_counter() - started
    for job in batch:
        job.waited += started - job.queued
        job.inference = seconds
    return said


def _not_finite() -> OutputError:
    return OutputError("the network failed on this image", got="a number not finite", allowed="finite numbers")


def _by_decision(batch: list[Job], finite: list[bool]) -> dict[tuple[float, int | None], list[int]]:
    """Places in a batch that can be decided together."""
    places: dict[tuple[float, int | None], list[int]] = {}
    for place, job in enumerate(batch):
        if finite[place]:
            places.setdefault((job.question.alpha, job.question.task), []).append(place)
    return places
