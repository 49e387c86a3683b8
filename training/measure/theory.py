"""The paper's theory (Sec. 3 and the appendix on definitions of TP) on a given model: losses and their bounds.

All losses are cross-entropies in nats, for images whose class is known: [n] images, T tasks, C classes. P'_k is the
probability that the detector of task k gives to "this image is of task k"; "in" is its positive side.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]
Integers = NDArray[np.integer[Any]]

SMALLEST = float(np.finfo(np.float64).tiny)
"""A probability that was rounded to 0 counts as this, so that every loss is finite (708 nats at most)."""


class DetectorProbabilities(NamedTuple):
    """The output of the detector of every task, [n, T]: log P'_k and log(1 - P'_k)."""

    log_in: Floats
    log_out: Floats

    @classmethod
    def of(cls, p_in: Floats) -> DetectorProbabilities:
        """From P'_k; 1 counts as the next smaller float, so that log(1 - P'_k) is finite."""
        return cls(-_nats(p_in), np.log1p(-np.minimum(p_in, 1 - np.finfo(np.float64).epsneg)))

    @classmethod
    def of_log_odds(cls, log_odds: Floats) -> DetectorProbabilities:
        """From log(P'_k / (1 - P'_k)): P'_k is its sigmoid."""
        return cls(-np.logaddexp(0.0, -log_odds), -np.logaddexp(0.0, log_odds))


class Losses(NamedTuple):
    """H_WP, H_TP and H_CIL [n], and H_OOD,k of every task's detector [n, T]."""

    wp: Floats
    tp: Floats
    ood: Floats
    cil: Floats


def losses(
    p_within_task: Floats,
    p_task: Floats,
    detectors: DetectorProbabilities,
    class_ids: Integers,
    task_of_class: Integers,
) -> Losses:
    """The losses of a model with CIL = WP x TP: WP is [n, C] and sums to one within a task, TP is [n, T]."""
    tasks = task_of_class[class_ids]
    wp, tp = _nats(_of(p_within_task, class_ids)), _of(_task_nats(p_task), tasks)
    cil = _nats(_of(p_within_task * p_task[:, task_of_class], class_ids))
    return Losses(wp, tp, detector_losses(detectors, tasks), cil)


def detector_losses(detectors: DetectorProbabilities, tasks: Integers) -> Floats:
    """H_OOD,k [n, T]: -log P'_k for an image of task k, -log(1 - P'_k) for any other."""
    own = tasks[:, None] == np.arange(detectors.log_in.shape[1])
    return np.asarray(np.minimum(-np.where(own, *detectors), -np.log(SMALLEST)))


def detectors_from_tasks(p_task: Floats, temperatures: Floats | float = 1.0) -> DetectorProbabilities:
    """The detectors that a TP implies: P'_k = P_k ** (1 / tau_k) (Theorem 2 i; with tau, its extension)."""
    with np.errstate(over="ignore"):  # with tau near 0, any P_k below 1 becomes 0
        log_in = np.maximum(-_task_nats(p_task) / np.asarray(temperatures), np.log(SMALLEST))
    return DetectorProbabilities(log_in, -_nats(-np.expm1(log_in)))


def cil_bound(wp: Floats, tp: Floats) -> Floats:
    """Theorem 1: H_CIL <= epsilon + delta, where H_WP <= epsilon and H_TP <= delta. At their values it is equality."""
    return np.asarray(wp + tp)


def detector_bound(tp: Floats, temperatures: Floats | float = 1.0) -> Floats:
    """Theorem 2 i and its extension: the largest loss of each implied detector, given H_TP <= delta [n].

    max(delta / tau_k, -log(1 - (1 - e^-delta) ** (1 / tau_k))), [n] for one tau or [n, T] for tau [T]; with tau = 1
    both are delta.
    """
    tau = np.asarray(temperatures)
    delta = tp[:, None] if tau.ndim else tp
    with np.errstate(over="ignore"):  # with tau near 0 the bound is infinite
        return np.asarray(np.maximum(delta / tau, _nats(_right(delta, tau))))


def tp_bound(ood: Floats, tasks: Integers) -> Floats:
    """Theorem 2 ii: H_TP <= e^delta_k0 * sum_k (1 - e^-delta_k) [n], for H_OOD,k <= delta_k and images of task k0."""
    with np.errstate(over="ignore"):  # the bound of a confident and wrong detector is infinite
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
    """The entry of each row in its own column."""
    return np.take_along_axis(values, columns[:, None], axis=1)[:, 0]


def _nats(probability: Floats) -> Floats:
    return np.asarray(-np.log(np.maximum(probability, SMALLEST)))


def _task_nats(p_task: Floats) -> Floats:
    """-log P_k [n, T]; above 1/2 computed from the sum of the others, which is more exact than 1 - P_k.

    Rounding then never makes a very confident TP exceed its bounds.
    """
    others = p_task @ (1 - np.eye(p_task.shape[1]))
    return np.where(p_task > 0.5, -np.log1p(-np.minimum(others, 0.5)), _nats(p_task))


def _wrong(loss: Floats) -> Floats:
    """1 - e^-loss: the probability that a detector gave to the wrong side."""
    return np.asarray(-np.expm1(-loss))


def _right(loss: Floats, tau: Floats) -> Floats:
    """1 - (1 - e^-loss) ** (1 / tau), exact also for small values and small losses."""
    with np.errstate(divide="ignore", over="ignore"):  # a loss of 0 gives log 0, and the result is 1
        log_wrong = np.where(loss < np.log(2), np.log(_wrong(loss)), np.log1p(-np.exp(-loss)))
        return np.asarray(-np.expm1(log_wrong / tau))
