"""The paper's theorems on a run: what each of them allows an image to lose, beside what was measured."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from training import theory
from training.evaluate import Tested
from training.task_prediction import normalised_power
from training.theory import Floats

ROUNDING = 1e-9
"""A bound and what it bounds are computed in different ways."""
NOTHING = 1e3
"""No loss is as large: a bound above this bounds nothing."""


@dataclass(frozen=True)
class Claim:
    """One theorem on every known test image [n], in nats."""

    theorem: str
    says: str
    """What it bounds, and by what."""
    measured: Floats
    bound: Floats
    guess: float
    """What guessing loses: a bound above it says nothing of use."""

    @property
    def holds(self) -> NDArray[np.bool_]:
        return np.asarray(self.measured <= self.bound * (1 + ROUNDING) + ROUNDING)

    def summary(self) -> ClaimSummary:
        return ClaimSummary(
            self.theorem,
            self.says,
            images=len(self.measured),
            holds=int(self.holds.sum()),
            useful=int((self.bound < self.guess).sum()),
            measured_mean=float(self.measured.mean()),
            measured_median=float(np.median(self.measured)),
            bound_mean=_finite(float(self.bound.mean())),
            bound_median=_finite(float(np.median(self.bound))),
        )


@dataclass(frozen=True)
class ClaimSummary:
    """A claim over all images; a bound is None where it bounds nothing."""

    theorem: str
    says: str
    images: int
    holds: int
    useful: int
    """Images whose bound is below what guessing loses."""
    measured_mean: float
    measured_median: float
    bound_mean: float | None
    bound_median: float | None


def claims(tested: Tested) -> tuple[Claim, ...]:
    """Theorems 1 to 3 and the extension of the second, by the detectors of the run's own reading.

    Theorems 2 ii and 3 are about TP_k = P'_k / sum; the extension about the reading's own TP, if that is one of P'_k.
    """
    verdicts, lost, tasks, detected = tested.verdicts, tested.losses, tested.tasks, tested.detected
    of_detectors = theory.losses(
        verdicts.p_within_task,
        normalised_power(detected.detectors.log_in, (1.0,)),
        detected.detectors,
        tested.class_ids,
        tested.run.rule.task_of_class,
    )
    tau = np.ones(verdicts.p_task.shape[1]) if detected.temperatures is None else detected.temperatures
    log_classes, log_tasks = (float(np.log(values.shape[1])) for values in (verdicts.p_within_task, verdicts.p_task))
    implied, tempered = (
        theory.detector_losses(theory.detectors_from_tasks(verdicts.p_task, each), tasks) for each in (1.0, tau)
    )
    return (
        Claim("1", "H_CIL by WP, TP", lost.cil, theory.cil_bound(lost.wp, lost.tp), log_classes),
        Claim("2 i", "H_OOD,k by TP", *_nearest(implied, theory.detector_bound(lost.tp)[:, None]), np.log(2)),
        Claim("2 ii", "H_TP by OOD", of_detectors.tp, theory.tp_bound(lost.ood, tasks), log_tasks),
        Claim(
            "3",
            "H_CIL by WP, OOD",
            of_detectors.cil,
            theory.cil_bound_of_detectors(lost.wp, lost.ood, tasks),
            log_classes,
        ),
        Claim("ext. i", "H_OOD,k by TP", *_nearest(tempered, theory.detector_bound(lost.tp, tau)), np.log(2)),
        Claim(
            "ext. ii",
            "H_TP by OOD",
            of_detectors.tp if detected.temperatures is None else lost.tp,
            theory.tempered_tp_bound(lost.ood, tasks, tau),
            log_tasks,
        ),
    )


def _nearest(measured: Floats, bound: Floats) -> tuple[Floats, Floats]:
    """Of a claim about every task's detector [n, T], the one nearest to its bound, or farthest beyond."""
    bound = np.broadcast_to(bound, measured.shape)
    place = (measured - np.minimum(bound, NOTHING)).argmax(axis=1)[:, None]
    chosen = (np.take_along_axis(values, place, axis=1)[:, 0] for values in (measured, bound))
    return next(chosen), next(chosen)


def _finite(value: float) -> float | None:
    return value if value < NOTHING else None
