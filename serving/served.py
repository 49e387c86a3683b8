"""A model in service, with all that follows from it: its words, its default question, the size of its batches."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass

import numpy as np

from serving.answer import Question, Wording
from serving.runtime import CUDA, Model

CUDA_BATCH = CPU_BATCH = 32
TRIAL_BATCH, TRIAL_SECONDS = 8, 0.1
WORTH_IT = 0.75
"""Batches are on if an image costs at most this share of what it costs alone."""

log = logging.getLogger("bentoml.openworld")


@dataclass(frozen=True, eq=False)
class Served:
    """What answers an image: every image is answered by one of these alone, whatever is swapped meanwhile."""

    model: Model
    max_batch: int
    wording: Wording
    question: Question
    """What is asked by those who ask for nothing special."""

    @classmethod
    def of(cls, model: Model, max_batch: int = 0) -> Served:
        """With batches as large as is measured to pay, unless a size is given."""
        return cls(model, max_batch or best_batch(model), Wording(model.manifest), Question.ask(model))

    @property
    def version(self) -> str:
        return self.model.manifest.version


def best_batch(model: Model) -> int:
    """How many images to run together: on a GPU many; on a CPU as many only if that is measured to pay."""
    if model.provider == CUDA:
        return CUDA_BATCH
    alone, together = _fastest(model, 1), _fastest(model, TRIAL_BATCH) / TRIAL_BATCH
    pays = together <= WORTH_IT * alone
    log.info(
        "an image takes %.2f ms alone and %.2f ms among %d: batches are %s",
        1000 * alone,
        1000 * together,
        TRIAL_BATCH,
        "on" if pays else "off",
    )
    return CPU_BATCH if pays else 1


def _fastest(model: Model, size: int) -> float:
    """Seconds of the fastest of a few runs; the others met something else on the machine."""
    pixels = np.resize(model.bundle.golden.pixels, (size, *model.manifest.image.shape))
    fastest, until = math.inf, time.perf_counter() + TRIAL_SECONDS
    for _ in range(5):
        started = time.perf_counter()
        model.predict(pixels)
        ended = time.perf_counter()
        fastest = min(fastest, ended - started)
        if ended > until:
            break
    return fastest
