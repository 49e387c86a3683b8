"""How good a run is. Every metric is a share between 0 and 1; in AUROC and the like, unknown is the positive class.

"Unknown" means: to be rejected. For all tasks together these are images of classes that were never learned; for the
detector of one task, images of the other tasks.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypedDict

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

from serving.bundle.decision import Outputs, Rule, Verdicts, judge

Floats = NDArray[np.floating[Any]]
Matrix = list[list[float | None]]
"""None where a task has no test images."""
DecisionFunction = Callable[[Outputs, Rule], Verdicts]
"""From the outputs of a network to verdicts: the served rule, or another one to compare it with."""
OutputsAfter = Callable[[int], tuple[Outputs, Outputs]]
"""A function from a number of learned tasks to the outputs for known and unknown images at that time."""

CALIBRATION_BINS = 15


class UnknownMetrics(TypedDict):
    """Images of classes never learned (positive unless stated otherwise) against those of learned classes."""

    auroc: float
    aupr: float
    """Area under precision and recall, unknown positive: chance is the share of unknown images."""
    aupr_known: float
    """Area under precision and recall, known positive: chance is the share of known images."""
    fpr95: float
    oscr: float
    accepted_known: float
    rejected_unknown: float


class Accuracies(TypedDict):
    """After some task was learned, over all test images of the tasks learned by then; None without test images."""

    cil_accuracy: float | None
    til_accuracy: float | None
    tp_accuracy: float | None
    forgetting_within_tasks: float
    """TIL accuracy that earlier tasks have lost since they were learned: 0 if their outputs have not changed."""
    lost_to_newer_classes: float
    """CIL accuracy that earlier tasks have lost since, beyond that: images taken for a class learned later."""
    accepted_known: float | None
    accepted_known_per_task: list[float | None]
    """The share of each task's own images; None for a task without test images."""
    accepted_known_lowest: float | None
    """The lowest of these shares. Of several tasks with few images each, chance alone makes it lower than what a task
    accepts in the long run."""
    rejected_unknown: float | None
    """The share of the images of never-learned classes that are rejected; None if there are none."""


class Stage(NamedTuple):
    """The verdicts after some task, on the test images of the tasks learned by then."""

    verdicts: Verdicts
    class_ids: NDArray[np.integer]
    rule: Rule
    accepted_unknown: NDArray[np.bool_]
    """Which images of classes that the run never learned were called known."""


def first_tasks(outputs: Outputs, rule: Rule, count: int) -> tuple[Outputs, Rule]:
    """The outputs and the rule of the network when it had learned `count` tasks.

    This is exact, not an estimate, if learning a task changes no bit of the outputs of earlier tasks.
    """
    end = rule.columns[count - 1].stop
    return {name: values[:, :end] for name, values in outputs.items()}, rule.of(range(count))


def mean_of(values: Sequence[float | None]) -> float | None:
    """The mean of the values that are not None."""
    measured = [value for value in values if value is not None]
    return float(np.mean(measured)) if measured else None


def _accuracy(right: NDArray[np.bool_]) -> float | None:
    return float(right.mean()) if len(right) else None


def stages(
    outputs: Outputs,
    rule: Rule,
    class_ids: NDArray[np.integer],
    decide: DecisionFunction = judge,
    unknown_outputs: Outputs | None = None,
    outputs_after: OutputsAfter | None = None,
) -> list[Stage]:
    """The run as it was after each of its tasks.

    The outputs of tasks that are frozen when they are learned are those of today, without the columns of later tasks.
    Of a run whose statistics change with every task, `outputs_after` returns the outputs at that time.
    """
    unknown = {name: values[:0] for name, values in outputs.items()} if unknown_outputs is None else unknown_outputs
    true_task = task_of(class_ids, rule)
    every = []
    for count in range(1, len(rule.tasks) + 1):
        seen = true_task < count
        known_then, unknown_then = (outputs, unknown) if outputs_after is None else outputs_after(count)
        then, rule_then = first_tasks({name: values[seen] for name, values in known_then.items()}, rule, count)
        accepted = decide(first_tasks(unknown_then, rule, count)[0], rule_then).known
        every.append(Stage(decide(then, rule_then), class_ids[seen], rule_then, accepted))
    return every


def accuracy_matrix(every: Sequence[Stage]) -> Matrix:
    """Row i, column k: CIL accuracy on task k's images after task i was learned (k <= i)."""
    rows = []
    for verdicts, ids, rule_then, _ in every:
        right, true_task = verdicts.class_id == ids, task_of(ids, rule_then)
        rows.append([_accuracy(right[true_task == task]) for task in range(len(rule_then.tasks))])
    return rows


def within_task_matrix(every: Sequence[Stage]) -> Matrix:
    """Row i, column k: TIL accuracy on task k's images after task i was learned (k <= i)."""
    rows = []
    for verdicts, ids, rule_then, _ in every:
        right, true_task = right_within_task(verdicts, rule_then, ids), task_of(ids, rule_then)
        rows.append([_accuracy(right[true_task == task]) for task in range(len(rule_then.tasks))])
    return rows


def after_each_task(every: Sequence[Stage], matrix: Matrix) -> list[Accuracies]:
    """CIL, TIL and TP accuracy, what earlier tasks have lost, and the shares accepted and rejected, after each task."""
    within = within_task_matrix(every)
    accepted = [accepted_per_task(stage) for stage in every]
    lost = [(forgetting(matrix[:count]), forgetting(within[:count])) for count in range(1, len(every) + 1)]
    return [
        Accuracies(
            cil_accuracy=_accuracy(verdicts.class_id == ids),
            til_accuracy=_accuracy(right_within_task(verdicts, rule_then, ids)),
            tp_accuracy=_accuracy(verdicts.task == task_of(ids, rule_then)),
            forgetting_within_tasks=lost_within,
            lost_to_newer_classes=lost_of_all - lost_within,
            accepted_known=_accuracy(verdicts.known),
            accepted_known_per_task=shares,
            accepted_known_lowest=min((share for share in shares if share is not None), default=None),
            rejected_unknown=_accuracy(~accepted_unknown),
        )
        for (verdicts, ids, rule_then, accepted_unknown), (lost_of_all, lost_within), shares in zip(
            every, lost, accepted, strict=True
        )
    ]


def accepted_per_task(stage: Stage) -> list[float | None]:
    """The share of the test images of each task so far that is called known."""
    true_task = task_of(stage.class_ids, stage.rule)
    return [_accuracy(stage.verdicts.known[true_task == task]) for task in range(len(stage.rule.tasks))]


def average_incremental_accuracy(accuracies: Sequence[Accuracies]) -> float | None:
    """Mean over tasks of the CIL accuracy, over everything learned by then, after the task was learned."""
    return mean_of([each["cil_accuracy"] for each in accuracies])


def forgetting(matrix: Matrix) -> float:
    """The paper's forgetting rate after the last task t of the matrix: sum over k < t of (A_k^init - A_k^t) / (t - 1).

    A_k^init is the accuracy on task k's images when it had just been learned, A_k^t after task t. Negative where
    accuracy rose; 0 after the first task, which has nothing to forget. The paper's accuracy is that of CIL. With TIL,
    the rate is what a task has forgotten itself: 0 if learning changes no output of earlier tasks. The difference of
    the two is lost to newer classes, which compete for the same images.
    """
    pairs = [(matrix[task][task], matrix[-1][task]) for task in range(len(matrix) - 1)]
    drops = [first - last for first, last in pairs if first is not None and last is not None]
    return float(np.mean(drops)) if drops else 0.0


def forgetting_in_words(*, changes_with_tasks: bool) -> dict[str, str]:
    """What the two numbers of `Accuracies` mean, by their names."""
    kept = "its outputs are the same, bit for bit, whatever is learned later"
    changed = "statistics that are pooled over all tasks change with every task"
    return {
        "forgetting_within_tasks": f"TIL accuracy that a task has lost since it was learned: "
        f"{changed if changes_with_tasks else kept}",
        "lost_to_newer_classes": "CIL accuracy that a task has lost since because its images are taken for classes "
        "that were learned later",
    }


def task_of(class_ids: NDArray[np.integer], rule: Rule) -> NDArray[np.integer]:
    return np.asarray(rule.task_of_class[class_ids])


def right_within_task(verdicts: Verdicts, rule: Rule, class_ids: NDArray[np.integer]) -> NDArray[np.bool_]:
    """Whether the class is the most probable one of its own task [n]: right if the task were given (TIL)."""
    own = rule.task_of_class == task_of(class_ids, rule)[:, None]
    return np.asarray(np.where(own, verdicts.p_within_task, -1.0).argmax(axis=1) == class_ids)


def calibration_error(confidence: Floats, right: NDArray[np.bool_], bins: int = CALIBRATION_BINS) -> float:
    """ECE: |accuracy - mean confidence| in bins of equal width, weighted by the number of answers in each.

    `confidence` [n] is the probability of the answer, `right` [n] whether the answer was right.
    """
    place = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    surplus = np.bincount(place, weights=confidence - right, minlength=bins)
    return float(np.abs(surplus).sum() / len(confidence))


def task_auroc(task_unknown_score: Floats, true_task: NDArray[np.integer]) -> list[float | None]:
    """The detector of each task on its own test images against those of all other tasks, which are positive (the
    paper's AUC_k)."""
    tasks = range(task_unknown_score.shape[1])
    if len(tasks) == 1:
        return []
    tested = np.unique(true_task)
    return [
        float(roc_auc_score(true_task != task, task_unknown_score[:, task]))
        if task in tested and len(tested) > 1
        else None
        for task in tasks
    ]


def oscr(known_score: Floats, right: NDArray[np.bool_], unknown_score: Floats) -> float:
    """Open-set classification rate: area under knowns accepted AND classified right over unknowns accepted.

    Positive is known here. That area is the share of pairs of a known and an unknown image in which the known one is
    classified right and looks less unknown, so it is at most the accuracy.
    """
    if not right.any():
        return 0.0
    scores = np.concatenate([known_score[right], unknown_score])
    is_unknown = np.repeat([0, 1], [int(right.sum()), len(unknown_score)])
    return float(right.mean() * roc_auc_score(is_unknown, scores))


def unknown_metrics(on_known: Verdicts, on_unknown: Verdicts, class_ids: NDArray[np.integer]) -> UnknownMetrics:
    """How well images of classes never learned are separated from those of `class_ids`; the rates are at alpha."""
    scores = np.concatenate([on_known.unknown_score, on_unknown.unknown_score])
    is_unknown = np.repeat([0, 1], [len(on_known.known), len(on_unknown.known)])
    # FPR@95 as usual in the field: the share of unknown images accepted when 95 % of the known ones are.
    accepted_unknown, accepted, _ = roc_curve(1 - is_unknown, -scores, drop_intermediate=False)
    return UnknownMetrics(
        auroc=float(roc_auc_score(is_unknown, scores)),
        aupr=float(average_precision_score(is_unknown, scores)),
        aupr_known=float(average_precision_score(1 - is_unknown, -scores)),
        fpr95=float(accepted_unknown[np.searchsorted(accepted, 0.95)]),
        oscr=oscr(on_known.unknown_score, on_known.class_id == class_ids, on_unknown.unknown_score),
        accepted_known=float(on_known.known.mean()),
        rejected_unknown=float(1 - on_unknown.known.mean()),
    )
