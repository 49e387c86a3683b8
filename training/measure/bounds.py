"""The paper's theorems on a run: the bound of each on the loss of an image, compared with the measured loss."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from training.measure import theory
from training.measure.evaluation import Evaluation
from training.measure.task_prediction import normalised_power
from training.measure.theory import Floats

ROUNDING = 1e-9
"""A bound and the loss are computed in different ways, so they may differ by rounding."""
VACUOUS = 1e3
"""Bounds above 1000 nats are vacuous and shown as "-"."""


@dataclass(frozen=True)
class BoundCheck:
    """One theorem on every known test image [n], in nats."""

    theorem: str
    statement: str
    """The loss that it bounds, and by what."""
    measured: Floats
    bound: Floats
    guess: float
    """The loss of guessing: a bound above it is of no use."""

    @property
    def holds(self) -> NDArray[np.bool_]:
        return np.asarray(self.measured <= self.bound * (1 + ROUNDING) + ROUNDING)

    def summary(self) -> dict[str, Any]:
        """The theorem over all images; `useful` are those whose bound is below guessing, a vacuous bound is None."""
        return {
            "theorem": self.theorem,
            "statement": self.statement,
            "images": len(self.measured),
            "holds": int(self.holds.sum()),
            "useful": int((self.bound < self.guess).sum()),
            "measured_mean": float(self.measured.mean()),
            "measured_median": float(np.median(self.measured)),
            "bound_mean": _finite(float(self.bound.mean())),
            "bound_median": _finite(float(np.median(self.bound))),
        }


def check_bounds(evaluation: Evaluation) -> tuple[BoundCheck, ...]:
    """Theorems 1 to 3 and the extension of the second, with the detectors of the decision rule that was evaluated.

    Theorems 2 ii and 3 are about TP_k = P'_k / sum; the extension is about the rule's own TP, if it is a power of P'_k.
    """
    verdicts, lost, tasks = evaluation.verdicts, evaluation.losses, evaluation.tasks
    detected = evaluation.task_detectors
    of_detectors = theory.losses(
        verdicts.p_within_task,
        normalised_power(detected.probabilities.log_in, (1.0,)),
        detected.probabilities,
        evaluation.class_ids,
        evaluation.run.rule.task_of_class,
    )
    tau = np.ones(verdicts.p_task.shape[1]) if detected.temperatures is None else detected.temperatures
    log_classes, log_tasks = (float(np.log(values.shape[1])) for values in (verdicts.p_within_task, verdicts.p_task))
    implied, tempered = (
        theory.detector_losses(theory.detectors_from_tasks(verdicts.p_task, each), tasks) for each in (1.0, tau)
    )
    of_wp_and_detectors = theory.cil_bound_of_detectors(lost.wp, lost.ood, tasks)
    tempered_tp = of_detectors.tp if detected.temperatures is None else lost.tp
    return (
        BoundCheck("1", "H_CIL by WP, TP", lost.cil, theory.cil_bound(lost.wp, lost.tp), log_classes),
        BoundCheck("2 i", "H_OOD,k by TP", *_nearest(implied, theory.detector_bound(lost.tp)[:, None]), np.log(2)),
        BoundCheck("2 ii", "H_TP by OOD", of_detectors.tp, theory.tp_bound(lost.ood, tasks), log_tasks),
        BoundCheck("3", "H_CIL by WP, OOD", of_detectors.cil, of_wp_and_detectors, log_classes),
        BoundCheck("ext. i", "H_OOD,k by TP", *_nearest(tempered, theory.detector_bound(lost.tp, tau)), np.log(2)),
        BoundCheck("ext. ii", "H_TP by OOD", tempered_tp, theory.tempered_tp_bound(lost.ood, tasks, tau), log_tasks),
    )


def _nearest(measured: Floats, bound: Floats) -> tuple[Floats, Floats]:
    """Given a bound for the detector of every task [n, T]: the measured value and the bound of the task that is nearest
    to its bound, or farthest beyond it."""
    bound = np.broadcast_to(bound, measured.shape)
    place = (measured - np.minimum(bound, VACUOUS)).argmax(axis=1)[:, None]
    nearest, its_bound = (np.take_along_axis(values, place, axis=1)[:, 0] for values in (measured, bound))
    return nearest, its_bound


def _finite(value: float) -> float | None:
    return value if value < VACUOUS else None
