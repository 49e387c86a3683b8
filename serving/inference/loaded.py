"""A loaded model with everything that is derived from it: answer formatter, default options, batch size."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from serving.bundle.model import Model, fastest_seconds
from serving.bundle.providers import CUDA
from serving.inference.answers import AnswerFormatter, PredictionOptions
from serving.telemetry import log

CUDA_BATCH = CPU_BATCH = 32
TRIAL_BATCH, TRIAL_RUNS, TRIAL_SECONDS = 8, range(1, 5), 0.1
WORTH_IT = 0.75
"""Batches are used if an image in a batch costs at most this share of what it costs alone."""
QUICK_SECONDS = 0.002
"""A graph that takes no longer for an image may run on the event loop; other requests hardly notice such a pause."""


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """Each image is answered by exactly one of these, even if the bundle is swapped in the meantime."""

    model: Model
    max_batch: int
    formatter: AnswerFormatter
    default_options: PredictionOptions
    quick: bool = False
    """Whether the graph may run on the event loop."""

    @classmethod
    def prepare(cls, model: Model, max_batch: int = 0) -> LoadedModel:
        """Measure the graph, and the batch size unless it is given."""
        formatter, options = AnswerFormatter(model.manifest), PredictionOptions.for_model(model)
        alone = _fastest(model, 1)
        return cls(model, max_batch or best_batch(model, alone), formatter, options, alone <= QUICK_SECONDS)

    @property
    def version(self) -> str:
        return self.model.manifest.version

    @property
    def path(self) -> Path:
        """The directory that the bundle was read from."""
        return self.model.bundle.path


def best_batch(model: Model, alone: float) -> int:
    """The largest batch: large on a GPU; on a CPU only if batches are measured to be faster, else 1.

    `alone` is the number of seconds that an image takes alone.
    """
    if model.provider == CUDA:
        return CUDA_BATCH
    in_batch = _fastest(model, TRIAL_BATCH) / TRIAL_BATCH
    faster = in_batch <= WORTH_IT * alone
    figures = f"{1000 * alone:.2f} ms alone and {1000 * in_batch:.2f} ms in a batch of {TRIAL_BATCH}"
    log.info("an image takes %s: batches are %s", figures, "on" if faster else "off")
    return CPU_BATCH if faster else 1


def _fastest(model: Model, size: int) -> float:
    """Seconds of the fastest of a few runs; slower runs were disturbed by other work on the machine."""
    pixels = np.resize(model.bundle.golden.pixels, (size, *model.manifest.image.shape))
    return fastest_seconds([partial(model.predict, pixels)], TRIAL_RUNS, TRIAL_SECONDS)[0]
