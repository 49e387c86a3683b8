"""The paper's +c: one scale and one shift per task, so that the logits of tasks learned separately are comparable.

alpha_k, beta_k minimise the cross-entropy of softmax(concatenation of alpha_k * f_k + beta_k) on the images of the
buffer, by the steps of stochastic gradient descent that the authors run. The loss is convex in these 2T numbers, but
its exact minimum can fit the few images of a buffer too closely.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating[Any]]

STEPS, RATE, MOMENTUM = 160, 0.01, 0.8
PER_TASK = 15
"""Images of each task in a step."""
SEED = 0
"""The seed of the initial alpha and beta, drawn from [0, 1) as in the authors' code, and of the images in each step."""


class Correction(NamedTuple):
    """One task's alpha and beta: its logits f become scale * f + shift."""

    scale: float
    shift: float


def corrected(logits: Array, corrections: Sequence[Correction], task_of_class: NDArray[np.integer[Any]]) -> Array:
    """alpha_k * f_k + beta_k for the concatenated logits [n, classes] of all tasks."""
    scale, shift = np.array(corrections, dtype=np.float64).T
    moved: Array = logits * scale[task_of_class] + shift[task_of_class]
    return moved


def fit_corrections(
    logits: Array, class_ids: NDArray[np.integer[Any]], task_of_class: NDArray[np.integer[Any]]
) -> tuple[Correction, ...]:
    """Every task's correction, from the logits [n, classes] of the buffer's images and their classes [n]."""
    generator = np.random.default_rng(SEED)
    member = np.eye(int(task_of_class.max()) + 1)[task_of_class]  # [classes, tasks]
    tasks = member.shape[1]
    exact = np.asarray(logits, dtype=np.float64)
    owned = [np.flatnonzero(task_of_class[class_ids] == task) for task in range(tasks)]
    numbers = generator.random(2 * tasks)
    speed = np.zeros_like(numbers)
    for _ in range(STEPS):
        rows = np.concatenate([generator.permutation(own)[:PER_TASK] for own in owned])
        speed = MOMENTUM * speed + _slope(numbers, exact[rows], class_ids[rows], member)
        numbers = numbers - RATE * speed
    return tuple(Correction(float(scale), float(shift)) for scale, shift in numbers.reshape(2, tasks).T)


def _slope(numbers: Array, logits: Array, class_ids: NDArray[np.integer[Any]], member: Array) -> Array:
    """The gradient of the mean cross-entropy at 2T numbers: scales, then shifts."""
    scale, shift = numbers.reshape(2, -1) @ member.T
    moved = logits * scale + shift
    error = np.exp(moved - moved.max(axis=1, keepdims=True))
    error /= error.sum(axis=1, keepdims=True)
    error[np.arange(len(logits)), class_ids] -= 1
    slope: Array = np.concatenate([((error * logits) @ member).mean(axis=0), (error @ member).mean(axis=0)])
    return slope
