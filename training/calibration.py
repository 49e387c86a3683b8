"""The paper's +c: one scale and one shift a task, so that the logits of tasks learned apart can be compared.

alpha_k, beta_k minimise the cross-entropy of softmax(concatenation of alpha_k * f_k + beta_k) on the kept images. These
are 2T numbers and the loss is convex in them, so Newton's method on all images at once finds the minimum itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating[Any]]

RIDGE = 1e-4
"""Holds scales near 1 and shifts near 0 where the images leave them free: all shifts together, and any scale of tasks
that make no mistake on the kept images."""
STEPS = 100
FLAT = 1e-9


class Correction(NamedTuple):
    """One task's alpha and beta: its logits f become scale * f + shift."""

    scale: float
    shift: float


def corrected(logits: Array, corrections: Sequence[Correction], task_of_class: NDArray[np.integer[Any]]) -> Array:
    """alpha_k * f_k + beta_k for logits [n, classes] of all tasks side by side."""
    scale, shift = np.array(corrections, dtype=np.float64).T
    moved: Array = logits * scale[task_of_class] + shift[task_of_class]
    return moved


def fit_corrections(
    logits: Array, class_ids: NDArray[np.integer[Any]], task_of_class: NDArray[np.integer[Any]]
) -> tuple[Correction, ...]:
    """Every task's correction, from logits [n, classes] of kept images and their classes [n]."""
    member = np.eye(int(task_of_class.max()) + 1)[task_of_class]  # [classes, tasks]
    said = np.asarray(logits, dtype=np.float64)
    tasks = member.shape[1]
    found = np.concatenate([np.ones(tasks), np.zeros(tasks)])
    cost, slope, curvature = _cross_entropy(found, said, class_ids, member)
    for _ in range(STEPS):
        if np.abs(slope).max() < FLAT:
            break
        step = np.linalg.solve(curvature, slope)
        length = 1.0
        # Far from the minimum a whole step may lead uphill.
        while (trial := _cross_entropy(found - length * step, said, class_ids, member))[0] > cost and length > 1e-10:
            length /= 2
        if trial[0] > cost:
            break
        found = found - length * step
        cost, slope, curvature = trial
    return tuple(Correction(float(scale), float(shift)) for scale, shift in found.reshape(2, tasks).T)


def _cross_entropy(
    numbers: Array, logits: Array, class_ids: NDArray[np.integer[Any]], member: Array
) -> tuple[float, Array, Array]:
    """The loss at 2T numbers (scales, then shifts), its gradient [2T] and its Hessian [2T, 2T]."""
    count, tasks = len(logits), member.shape[1]
    scale, shift = numbers.reshape(2, tasks) @ member.T
    moved = logits * scale + shift
    moved -= moved.max(axis=1, keepdims=True)
    raised = np.exp(moved)
    probability = raised / raised.sum(axis=1, keepdims=True)
    rows = np.arange(count)
    away = numbers - np.repeat([1.0, 0.0], tasks)
    cost = np.mean(np.log(raised.sum(axis=1)) - moved[rows, class_ids]) + RIDGE / 2 * away @ away
    error = probability.copy()
    error[rows, class_ids] -= 1
    slope = np.concatenate([((error * logits) @ member).mean(axis=0), (error @ member).mean(axis=0)]) + RIDGE * away
    # How the expectation of each number's own logits varies: within a task, less between all of them.
    first, mass = (probability * logits) @ member, probability @ member
    expected = np.concatenate([first, mass], axis=1)
    within = [[(probability * logits**2) @ member, first], [first, mass]]
    blocks = [[np.diag(part.mean(axis=0)) for part in row] for row in within]
    curvature = np.block(blocks) - expected.T @ expected / count + RIDGE * np.eye(2 * tasks)
    return float(cost), slope, curvature
