"""The adapters of a bundle against the masked network that they were baked from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export.checks.parity import ParityError
from serving.bundle.pooled_model import PooledModel
from training.learn.adapters.baking import network_logits
from training.run import Run

ALLOWED_LOGITS = 0.02
"""Relative to the spread of a task's logits: weights are stored in 16 bits."""


def verify_adapters(
    run: Run, model: PooledModel, encoded: NDArray[np.float32], sizes: Sequence[int]
) -> dict[str, float]:
    """Compare calibrated logits for vectors, in batches of each of the sizes; raises a ParityError.

    An adapter answers each row alone, so batches of all sizes give the same bits. The network is compared with in
    batches of these sizes, because its own last bits depend on them.
    """
    if not model.adapters or run.adapters is None:
        return {}
    views: NDArray[np.float32] = encoded if encoded.ndim == 3 else encoded[:, None]
    worst = 0.0
    for task, adapter in enumerate(model.adapters):
        got = _in_batches(adapter.logits, views, sizes[0])
        if any(not np.array_equal(got, _in_batches(adapter.logits, views, size)) for size in sizes[1:]):
            raise ParityError(f"adapter of task {task}: an answer depends on the other images of its batch")
        for size in sizes:
            expected = adapter.scale * _in_batches(partial(network_logits, run.adapters.network, task), views, size)
            spread = max(float(expected.std()), 1e-6)
            worst = max(worst, float(np.abs(got - expected).max()) / spread)
    # Written so that NaN fails as well.
    if not worst <= ALLOWED_LOGITS:
        raise ParityError(
            f"adapters: a logit differs from the network's by {worst:.2g} > {ALLOWED_LOGITS:g} of a spread"
        )
    return {"adapter_difference": worst}


def _in_batches(
    compute: Callable[[NDArray[np.float32]], NDArray[Any]], rows: NDArray[np.float32], size: int
) -> NDArray[Any]:
    return np.concatenate([compute(rows[start : start + size]) for start in range(0, len(rows), size)])
