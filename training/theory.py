"""The paper's theory (Sec. 3 and the appendix on definitions of TP) for a model as it is: losses and what bounds them.

All losses are cross-entropies in nats, for images whose class is known: [n] images, T tasks, C classes. P'_k is what
the detector of task k says of "this image is of task k"; "in" is the positive side of a detector.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]
Integers = NDArray[np.integer[Any]]

SMALLEST = float(np.finfo(np.float64).tiny)
"""A probability that was rounded to 0 counts as this, so that every loss is finite (708 nats at most)."""


class Detectors(NamedTuple):
    """What every task's detector says, [n, T]: log P'_k and log(1 - P'_k)."""

    log_in: Floats
    log_out: Floats

    @classmethod
    def of(cls, p_in: Floats) -> Detectors:
        """From P'_k; one that was rounded to 1 counts as the number before it, 36.7 nats."""
        return cls(-_nats(p_in), np.log1p(-np.minimum(p_in, 1 - np.finfo(np.float64).epsneg)))

    @classmethod
    def of_log_odds(cls, log_odds: Floats) -> Detectors:
        """From log(P'_k / (1 - P'_k)): P'_k is its sigmoid."""
        return cls(-np.logaddexp(0.0, -log_odds), -np.logaddexp(0.0, log_odds))


class Losses(NamedTuple):
    """H_WP, H_TP and H_CIL [n], and H_OOD,k of every task's detector [n, T]."""

    wp: Floats
    tp: Floats
    ood: Floats
    cil: Floats


def losses(
    p_within_task: Floats, p_task: Floats, detectors: Detectors, class_ids: Integers, task_of_class: Integers
) -> Losses:
    """Of a model with CIL = WP x TP: WP is [n, C] and sums to one within a task, TP is [n, T]."""
    tasks = task_of_class[class_ids]
    wp, tp = _nats(_of(p_within_task, class_ids)), _of(_task_nats(p_task), tasks)
    cil = _nats(_of(p_within_task * p_task[:, task_of_class], class_ids))
    return Losses(wp, tp, detector_losses(detectors, tasks), cil)


def detector_losses(detectors: Detectors, tasks: Integers) -> Floats:
    """H_OOD,k [n, T]: -log P'_k for an image of task k, -log(1 - P'_k) for any other."""
    own = tasks[:, None] == np.arange(detectors.log_in.shape[1])
    return np.asarray(np.minimum(-np.where(own, *detectors), -np.log(SMALLEST)))


def detectors_from_tasks(p_task: Floats, temperatures: Floats | float = 1.0) -> Detectors:
    """The detectors that a TP implies: P'_k = P_k ** (1 / tau_k) (Theorem 2 i; with tau, its extension)."""
    with np.errstate(over="ignore"):  # a tau near 0 leaves nothing of what is not all
        log_in = np.maximum(-_task_nats(p_task) / np.asarray(temperatures), np.log(SMALLEST))
    return Detectors(log_in, -_nats(-np.expm1(log_in)))


def implied_by_classes(p_class: Floats, task_of_class: Integers) -> tuple[Floats, Floats]:
    """The WP [n, C] and the TP [n, T] of a CIL model that has neither (Theorem 4): shares of, and sums over, a task."""
    p_task = np.stack([p_class[:, task_of_class == task].sum(axis=1) for task in np.unique(task_of_class)], axis=1)
    return p_class / np.maximum(p_task, SMALLEST)[:, task_of_class], p_task


def cil_bound(wp: Floats, tp: Floats) -> Floats:
    """Theorem 1: H_CIL <= epsilon + delta, where H_WP <= epsilon and H_TP <= delta. At their values it is equality."""
    return np.asarray(wp + tp)


def detector_bound(tp: Floats, temperatures: Floats | float = 1.0) -> Floats:
    """Theorem 2 i and its extension: what H_TP <= delta [n] leaves each implied detector to lose at most.

    max(delta / tau_k, -log(1 - (1 - e^-delta) ** (1 / tau_k))), [n] for one tau or [n, T] for tau [T]; with tau = 1
    both are delta.
    """
    tau = np.asarray(temperatures)
    delta = tp[:, None] if tau.ndim else tp
    with np.errstate(over="ignore"):  # a tau near 0 bounds nothing
        return np.asarray(np.maximum(delta / tau, _nats(_right(delta, tau))))


def tp_bound(ood: Floats, tasks: Integers) -> Floats:
    """Theorem 2 ii: H_TP <= e^delta_k0 * sum_k (1 - e^-delta_k) [n], for H_OOD,k <= delta_k and images of task k0."""
    with np.errstate(over="ignore"):  # a detector that is sure and wrong bounds nothing
        return np.asarray(np.exp(_of(ood, tasks)) * _wrong(ood).sum(axis=1))


def cil_bound_of_detectors(wp: Floats, ood: Floats, tasks: Integers) -> Floats:
    """Theorem 3: H_CIL <= epsilon + e^delta_k0 * sum_k (1 - e^-delta_k)."""
    return np.asarray(wp + tp_bound(ood, tasks))


def tempered_tp_bound(ood: Floats, tasks: Integers, temperatures: Floats | float = 1.0) -> Floats:
    """Extension of Theorem 2, ii: delta_k0 / tau_k0 + sum_k w_k / (1 - w_k0), w_k = (1 - e^-delta_k) ** (1 / tau_k)."""
    tau = np.broadcast_to(np.asarray(temperatures, dtype=np.float64), ood.shape)
    wrong = _wrong(ood) ** (1 / tau)
    with np.errstate(over="ignore"):
        right = np.maximum(_of(_right(ood, tau), tasks), SMALLEST)
        return np.asarray(_of(ood / tau, tasks) + wrong.sum(axis=1) / right)


def _of(values: Floats, columns: Integers) -> Floats:
    """Each row's entry in its own column."""
    return np.take_along_axis(values, columns[:, None], axis=1)[:, 0]


def _nats(probability: Floats) -> Floats:
    return np.asarray(-np.log(np.maximum(probability, SMALLEST)))


def _task_nats(p_task: Floats) -> Floats:
    """-log P_k [n, T]; near 1 by the sum of the others, which is not rounded as 1 - P_k is.

    So a TP that is sure, rightly or wrongly, stays within its bounds by more than rounding.
    """
    others = p_task @ (1 - np.eye(p_task.shape[1]))
    return np.where(p_task > 0.5, -np.log1p(-np.minimum(others, 0.5)), _nats(p_task))


def _wrong(loss: Floats) -> Floats:
    """1 - e^-loss: how much of its probability a detector gave to the wrong side."""
    return np.asarray(-np.expm1(-loss))


def _right(loss: Floats, tau: Floats) -> Floats:
    """1 - (1 - e^-loss) ** (1 / tau), exact also where it or the loss is small."""
    with np.errstate(divide="ignore", over="ignore"):  # where nothing is lost, log 0 leaves all of it
        log_wrong = np.where(loss < np.log(2), np.log(_wrong(loss)), np.log1p(-np.exp(-loss)))
        return np.asarray(-np.expm1(log_wrong / tau))
