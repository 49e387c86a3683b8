"""How good a run is. Everything is a share between 0 and 1; where two groups are told apart, unknown is positive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypedDict

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score, roc_curve

from serving.decision import Outputs, Rule, Verdicts, judge

Floats = NDArray[np.floating[Any]]
Matrix = list[list[float | None]]
"""None where a task has no test images."""


class Decision(Protocol):
    """From what a network says to verdicts: the rule that is served, or another to compare it with."""

    def __call__(
        self, outputs: Outputs, rule: Rule, *, alpha: float | None = None, given_task: int | None = None
    ) -> Verdicts: ...


class UnknownMetrics(TypedDict):
    """Telling images of classes never learned from those of classes learned."""

    auroc: float
    fpr95: float
    accepted_known: float
    rejected_unknown: float


def first_tasks(outputs: Outputs, rule: Rule, count: int) -> tuple[Outputs, Rule]:
    """What a network said and knew when it had learned `count` tasks.

    Exact, not an estimate: learning a task changes no bit of what earlier tasks say.
    """
    end = rule.columns[count - 1].stop
    earlier = Rule(score=rule.score, alpha=rule.alpha, tasks=rule.tasks[:count])
    return {name: values[:, :end] for name, values in outputs.items()}, earlier


def mean_of(values: Sequence[float | None]) -> float | None:
    """The mean of those that could be measured."""
    measured = [value for value in values if value is not None]
    return float(np.mean(measured)) if measured else None


def _accuracy(right: NDArray[np.bool_]) -> float | None:
    return float(right.mean()) if len(right) else None


def accuracy_matrix(outputs: Outputs, rule: Rule, class_ids: NDArray[np.integer], decide: Decision = judge) -> Matrix:
    """Row i, column k: CIL accuracy on task k's images after task i was learned (k <= i)."""
    true_task = task_of(class_ids, rule)
    rows = []
    for count in range(1, len(rule.tasks) + 1):
        seen = true_task < count
        verdicts = decide(*first_tasks({name: values[seen] for name, values in outputs.items()}, rule, count))
        right = verdicts.class_id == class_ids[seen]
        rows.append([_accuracy(right[true_task[seen] == task]) for task in range(count)])
    return rows


def forgetting(matrix: Matrix) -> float:
    """Mean over all but the last task of (accuracy when first learned - accuracy at the end)."""
    pairs = [(matrix[task][task], matrix[-1][task]) for task in range(len(matrix) - 1)]
    drops = [first - last for first, last in pairs if first is not None and last is not None]
    return float(np.mean(drops)) if drops else 0.0


def task_of(class_ids: NDArray[np.integer], rule: Rule) -> NDArray[np.integer]:
    """The task that each class belongs to."""
    tasks: NDArray[np.integer] = rule.task_of_class[class_ids]
    return tasks


def til_accuracy(outputs: Outputs, rule: Rule, class_ids: NDArray[np.integer], decide: Decision = judge) -> float:
    """Accuracy when the task is given."""
    true_task = task_of(class_ids, rule)
    right = [
        decide(outputs, rule, given_task=task).class_id[true_task == task] == class_ids[true_task == task]
        for task in range(len(rule.tasks))
    ]
    return float(np.concatenate(right).mean())


def task_auroc(task_unknown_score: Floats, true_task: NDArray[np.integer]) -> list[float | None]:
    """Each task's own detector: its test images against all other tasks' (the paper's AUC_k)."""
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


def unknown_metrics(known: Outputs, unknown: Outputs, rule: Rule, decide: Decision = judge) -> UnknownMetrics:
    """AUROC and FPR at 95 % of knowns accepted, and both rates at the rule's own alpha."""
    on_known, on_unknown = decide(known, rule), decide(unknown, rule)
    scores = np.concatenate([on_known.unknown_score, on_unknown.unknown_score])
    is_unknown = np.repeat([0, 1], [len(on_known.known), len(on_unknown.known)])
    # As elsewhere in the field: the share of unknowns let through when 95 % of the knowns are.
    let_through, accepted, _ = roc_curve(1 - is_unknown, -scores, drop_intermediate=False)
    return UnknownMetrics(
        auroc=float(roc_auc_score(is_unknown, scores)),
        fpr95=float(let_through[np.searchsorted(accepted, 0.95)]),
        accepted_known=float(on_known.known.mean()),
        rejected_unknown=float(1 - on_unknown.known.mean()),
    )
