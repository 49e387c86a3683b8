"""What holds a run back: for each task, whether the class within it (WP) or the task itself (TP) is missed."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from training import metrics, theory
from training.bounds import Claim, claims
from training.capacity import Capacity, capacity
from training.evaluate import Tested

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class TaskDiagnosis:
    """One task's test images; accuracies and losses of accuracy are shares, losses in nats are means."""

    images: int
    cil_accuracy: float
    wp_accuracy: float
    tp_accuracy: float
    lost_to_wp: float
    """CIL accuracy that a perfect WP would add: the task was right, the class was not."""
    lost_to_tp: float
    """CIL accuracy that a perfect TP would add: the class would have been right within its task."""
    nats_wp: float
    nats_tp: float
    nats_cil: float
    """What both of them lose together (Theorem 1)."""
    accepted: float

    @property
    def held_back_by(self) -> str:
        """WP or TP, by accuracy and where that is equal by nats; nothing where every image is right."""
        if self.cil_accuracy == 1:
            return "-"
        return "WP" if (self.lost_to_wp, self.nats_wp) > (self.lost_to_tp, self.nats_tp) else "TP"


class DetectorNats(NamedTuple):
    """H_OOD,k: what one task's own detector P'_k loses, in the mean; None where there is no such image."""

    own: float | None
    """On images of the task, which it should know."""
    others: float | None
    """On images of the other tasks, which it should not."""
    all: float


class Confusion(NamedTuple):
    """Images of one class, or of one task, that were taken for another's."""

    true: str
    said: str
    images: int
    share: float
    """Of the test images of the true one."""


@dataclass(frozen=True)
class Diagnosis:
    """A run as a whole, and its tasks; None for a task without test images."""

    whole: TaskDiagnosis
    tasks: tuple[TaskDiagnosis | None, ...]
    detector: str
    """What P'_k is."""
    detectors: tuple[DetectorNats, ...]
    claims: tuple[Claim, ...]
    task_confusions: tuple[Confusion, ...]
    class_confusions: tuple[Confusion, ...]
    capacity: Capacity

    @property
    def within_bounds(self) -> int:
        """Images on which every theorem holds."""
        return int(np.all([claim.holds for claim in self.claims], axis=0).sum())

    def as_json(self) -> dict[str, Any]:
        content = asdict(replace(self, claims=()))
        content["theorems"] = [asdict(claim.summary()) for claim in self.claims]
        del content["claims"]
        for each, task in zip((content["whole"], *content["tasks"]), (self.whole, *self.tasks), strict=True):
            if task is not None:
                each["held_back_by"] = task.held_back_by
        for name in ("detectors", "task_confusions", "class_confusions"):
            content[name] = [each._asdict() for each in getattr(self, name)]
        return content


def diagnose(tested: Tested) -> Diagnosis:
    """Look at every known test image."""
    run, verdicts = tested.run, tested.verdicts
    tasks = range(len(run.config.tasks))
    return Diagnosis(
        whole=_diagnosis_of(tested, np.ones(len(tested.known), dtype=bool)),
        tasks=tuple(
            _diagnosis_of(tested, own) if own.any() else None for own in (tested.tasks == task for task in tasks)
        ),
        detector=tested.detected.formula,
        detectors=tuple(_detector_nats(tested.losses.ood[:, task], tested.tasks == task) for task in tasks),
        claims=claims(tested),
        task_confusions=confusions(tested.tasks, verdicts.task, [f"task {task}" for task in tasks]),
        class_confusions=confusions(tested.class_ids, verdicts.class_id, list(run.config.labels)),
        capacity=capacity(run.network),
    )


def _detector_nats(lost: theory.Floats, own: Bools) -> DetectorNats:
    of_own, of_others = (float(part.mean()) if len(part) else None for part in (lost[own], lost[~own]))
    return DetectorNats(of_own, of_others, float(lost.mean()))


def _diagnosis_of(tested: Tested, chosen: Bools) -> TaskDiagnosis:
    verdicts = tested.verdicts
    cil = float((verdicts.class_id == tested.class_ids)[chosen].mean())
    wp = float(metrics.right_within_task(verdicts, tested.run.rule, tested.class_ids)[chosen].mean())
    tp = float((verdicts.task == tested.tasks)[chosen].mean())
    return TaskDiagnosis(
        images=int(chosen.sum()),
        cil_accuracy=cil,
        wp_accuracy=wp,
        tp_accuracy=tp,
        lost_to_wp=tp - cil,
        lost_to_tp=wp - cil,
        nats_wp=float(tested.losses.wp[chosen].mean()),
        nats_tp=float(tested.losses.tp[chosen].mean()),
        nats_cil=float(tested.losses.cil[chosen].mean()),
        accepted=float(verdicts.known[chosen].mean()),
    )


def confusion_matrix(true: NDArray[np.integer], said: NDArray[np.integer], size: int) -> NDArray[np.int64]:
    """[true, said]: how many images."""
    return np.bincount(true * size + said, minlength=size * size).reshape(size, size)


def confusions(true: NDArray[np.integer], said: NDArray[np.integer], names: list[str]) -> tuple[Confusion, ...]:
    """All mistakes by pair, the most frequent first."""
    counts = confusion_matrix(true, said, len(names))
    totals = counts.sum(axis=1)
    np.fill_diagonal(counts, 0)
    pairs = np.argwhere(counts)
    found = [Confusion(names[i], names[j], int(counts[i, j]), float(counts[i, j] / totals[i])) for i, j in pairs]
    return tuple(sorted(found, key=lambda each: (-each.images, -each.share)))
