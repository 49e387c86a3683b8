"""What limits a run: for each task, whether errors come from the class within it (WP) or from the task (TP)."""

from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from training.measure import metrics, theory
from training.measure.bounds import BoundCheck, check_bounds
from training.measure.capacity import Capacity, capacity
from training.measure.evaluation import Evaluation

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class TaskDiagnosis:
    """The test images of one task; accuracies are shares, losses in nats are means."""

    images: int
    cil_accuracy: float
    wp_accuracy: float
    tp_accuracy: float
    lost_to_wp: float
    """CIL accuracy that a perfect WP would add: the task was right and the class was wrong."""
    lost_to_tp: float
    """CIL accuracy that a perfect TP would add: the class would have been right within its task."""
    nats_wp: float
    nats_tp: float
    nats_cil: float
    """The sum of the two (Theorem 1)."""
    accepted: float

    @property
    def held_back_by(self) -> str:
        """WP or TP, whichever costs more accuracy, or more nats if that is equal; "-" if every image is right."""
        if self.cil_accuracy == 1:
            return "-"
        return "WP" if (self.lost_to_wp, self.nats_wp) > (self.lost_to_tp, self.nats_tp) else "TP"


class DetectorNats(NamedTuple):
    """H_OOD,k: the mean loss of the detector P'_k of one task; None if there is no such image."""

    own: float | None
    """On images of the task, which it should accept."""
    others: float | None
    """On images of the other tasks, which it should reject."""
    all: float


class Confusion(NamedTuple):
    """Images of one class, or of one task, that were predicted as another one."""

    true: str
    predicted: str
    images: int
    share: float
    """The share of the test images of the true class or task."""


@dataclass(frozen=True)
class Diagnosis:
    """A whole run, and each of its tasks; None for a task without test images."""

    whole: TaskDiagnosis
    tasks: tuple[TaskDiagnosis | None, ...]
    detector: str
    """The formula of P'_k, as text."""
    detectors: tuple[DetectorNats, ...]
    bounds: tuple[BoundCheck, ...]
    task_confusions: tuple[Confusion, ...]
    class_confusions: tuple[Confusion, ...]
    capacity: Capacity | None
    """None without a network."""
    after_each_task: tuple[metrics.Accuracies, ...]
    forgetting_in_words: dict[str, str]
    """One sentence on each of the two numbers for forgetting."""

    @property
    def within_bounds(self) -> int:
        """The number of images on which every theorem holds."""
        return int(np.all([check.holds for check in self.bounds], axis=0).sum())

    def as_json(self) -> dict[str, Any]:
        content = asdict(replace(self, bounds=()))
        content["theorems"] = [check.summary() for check in self.bounds]
        del content["bounds"]
        for each, task in zip((content["whole"], *content["tasks"]), (self.whole, *self.tasks), strict=True):
            if task is not None:
                each["held_back_by"] = task.held_back_by
        for name in ("detectors", "task_confusions", "class_confusions"):
            content[name] = [each._asdict() for each in getattr(self, name)]
        return content


def diagnose(evaluation: Evaluation) -> Diagnosis:
    """The diagnosis of a run, from its known test images."""
    run, verdicts = evaluation.run, evaluation.verdicts
    tasks = range(len(run.config.tasks))
    return Diagnosis(
        whole=_diagnosis_of(evaluation, np.ones(len(evaluation.known), dtype=bool)),
        tasks=tuple(
            _diagnosis_of(evaluation, own) if own.any() else None
            for own in (evaluation.tasks == task for task in tasks)
        ),
        detector=evaluation.task_detectors.formula,
        detectors=tuple(_detector_nats(evaluation.losses.ood[:, task], evaluation.tasks == task) for task in tasks),
        bounds=check_bounds(evaluation),
        task_confusions=confusions(evaluation.tasks, verdicts.task, [f"task {task}" for task in tasks]),
        class_confusions=confusions(evaluation.class_ids, verdicts.class_id, list(run.config.labels)),
        capacity=None if run.masked_network is None else capacity(run.masked_network),
        after_each_task=tuple(evaluation.over_time[1]),
        forgetting_in_words=evaluation.forgetting_in_words,
    )


def _detector_nats(losses: theory.Floats, own: Bools) -> DetectorNats:
    of_own, of_others = (float(part.mean()) if len(part) else None for part in (losses[own], losses[~own]))
    return DetectorNats(of_own, of_others, float(losses.mean()))


def _diagnosis_of(evaluation: Evaluation, chosen: Bools) -> TaskDiagnosis:
    verdicts = evaluation.verdicts
    cil = float((verdicts.class_id == evaluation.class_ids)[chosen].mean())
    wp = float(metrics.right_within_task(verdicts, evaluation.run.rule, evaluation.class_ids)[chosen].mean())
    tp = float((verdicts.task == evaluation.tasks)[chosen].mean())
    return TaskDiagnosis(
        images=int(chosen.sum()),
        cil_accuracy=cil,
        wp_accuracy=wp,
        tp_accuracy=tp,
        lost_to_wp=tp - cil,
        lost_to_tp=wp - cil,
        nats_wp=float(evaluation.losses.wp[chosen].mean()),
        nats_tp=float(evaluation.losses.tp[chosen].mean()),
        nats_cil=float(evaluation.losses.cil[chosen].mean()),
        accepted=float(verdicts.known[chosen].mean()),
    )


def confusion_matrix(true: NDArray[np.integer], predicted: NDArray[np.integer], size: int) -> NDArray[np.int64]:
    """[true, predicted]: the number of images."""
    return np.bincount(true * size + predicted, minlength=size * size).reshape(size, size)


def confusions(true: NDArray[np.integer], predicted: NDArray[np.integer], names: list[str]) -> tuple[Confusion, ...]:
    """All errors by pair, the most frequent first."""
    counts = confusion_matrix(true, predicted, len(names))
    totals = counts.sum(axis=1)
    np.fill_diagonal(counts, 0)
    pairs = np.argwhere(counts)
    found = [Confusion(names[i], names[j], int(counts[i, j]), float(counts[i, j] / totals[i])) for i, j in pairs]
    return tuple(sorted(found, key=lambda each: (-each.images, -each.share)))
