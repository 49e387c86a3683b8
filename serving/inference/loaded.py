"""A loaded model with everything that is derived from it: answer formatter, default options, batch size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from serving.bundle.model import BundleModel, fastest_seconds
from serving.bundle.providers import CUDA
from serving.inference.answers import AnswerFormatter, PredictionOptions
from serving.telemetry import log

TRUNK_KEY = "trunk"
"""The key in a stored answer that names the weights of the trunk."""
CUDA_BATCH = CPU_BATCH = 32
TRIAL_BATCH, TRIAL_RUNS, TRIAL_SECONDS = 8, range(1, 50), 0.2
WORTH_IT = 0.75
"""Batches are used if an image in a batch costs at most this share of what it costs alone."""
QUICK_SECONDS = 0.002
"""A graph that takes no longer for an image may run on the event loop; other requests hardly notice such a pause."""


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """Each image is answered by exactly one of these, even if the bundle is swapped in the meantime."""

    model: BundleModel
    max_batch: int
    formatter: AnswerFormatter
    default_options: PredictionOptions
    quick: bool = False
    """Whether the graph may run on the event loop."""

    @classmethod
    def prepare(cls, model: BundleModel, max_batch: int = 0, like: LoadedModel | None = None) -> LoadedModel:
        """Measure the graph, and the batch size unless it is given. What runs in the session of another one is not
        measured again."""
        formatter, options = AnswerFormatter(model.manifest), PredictionOptions.for_model(model)
        if like is not None and like.model.session is model.session:
            return cls(model, like.max_batch, formatter, options, like.quick)
        given = CUDA_BATCH if model.provider == CUDA else 0
        seconds = fastest_runs(model, (1,) if max_batch or given else (1, TRIAL_BATCH))
        chosen = max_batch or given or best_batch(seconds[1], seconds[TRIAL_BATCH] / TRIAL_BATCH)
        return cls(model, chosen, formatter, options, seconds[1] <= QUICK_SECONDS)

    @property
    def version(self) -> str:
        return self.model.manifest.version

    def noted(self, fields: dict[str, Any]) -> dict[str, Any]:
        """An answer as the quarantine stores it, with the trunk that made the features."""
        trunk = self.model.manifest.trunk
        return fields if trunk is None else {**fields, TRUNK_KEY: trunk.sha256}

    @property
    def tasks(self) -> int:
        return len(self.model.bundle.rule.tasks)

    @property
    def path(self) -> Path:
        """The directory that the bundle was read from."""
        return self.model.bundle.path


def best_batch(alone: float, in_batch: float) -> int:
    """The largest batch on a CPU, for seconds per image alone and in a batch: 1 if a batch is no faster."""
    faster = in_batch <= WORTH_IT * alone
    figures = f"{1000 * alone:.2f} ms alone and {1000 * in_batch:.2f} ms in a batch of {TRIAL_BATCH}"
    log.info("an image takes %s: batches are %s", figures, "on" if faster else "off")
    return CPU_BATCH if faster else 1


def fastest_runs(model: BundleModel, sizes: Sequence[int]) -> dict[int, float]:
    """Seconds of the fastest run of a batch of each size; slower runs were disturbed by other work on the machine."""
    golden, shape = model.bundle.golden.pixels, model.manifest.image.shape
    works = [partial(model.predict, np.resize(golden, (size, *shape))) for size in sizes]
    return dict(zip(sizes, fastest_seconds(works, TRIAL_RUNS, TRIAL_SECONDS), strict=True))
