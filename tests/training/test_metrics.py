from __future__ import annotations

import numpy as np
import pytest

from serving.decision import Rule, TaskRule
from tests.helpers import as_float
from training.metrics import (
    accuracy_matrix,
    first_tasks,
    forgetting,
    mean_of,
    task_auroc,
    task_of,
    til_accuracy,
    unknown_metrics,
)

ONE = TaskRule.fit([0.0], classes=2)
RULE = Rule(score="max_logit", alpha=0.05, tasks=(ONE, ONE))
LOGITS = as_float([[5, 0, 1, 1], [0, 5, 9, 0], [0, 0, 5, 0], [9, 0, 0, 5]])
"""Of one image of each class; the second and the fourth look more like the other task's."""
OUTPUTS = {"logits": LOGITS, "distances": np.ones_like(LOGITS)}
CLASS_IDS = np.arange(4)


def of_scores(scores: list[float]) -> dict[str, np.ndarray]:
    """Outputs of a task with a single class, whose max-logit score is as given."""
    logits = -as_float(scores)[:, None]
    return {"logits": logits, "distances": np.ones_like(logits)}


def single_task_rule(validation_scores: list[float]) -> Rule:
    return Rule(score="max_logit", alpha=0.5, tasks=(TaskRule.fit(validation_scores, classes=1),))


def test_accuracy_matrix_has_a_row_for_each_task_learned() -> None:
    assert accuracy_matrix(OUTPUTS, RULE, CLASS_IDS) == [[1.0], [0.5, 0.5]]


def test_til_accuracy_is_told_the_task() -> None:
    assert til_accuracy(OUTPUTS, RULE, CLASS_IDS) == 1.0
    wrong = {**OUTPUTS, "logits": LOGITS[[1, 0, 2, 3]]}
    assert til_accuracy(wrong, RULE, CLASS_IDS) == 0.5


def test_task_of_a_class() -> None:
    rule = Rule(tasks=(TaskRule.fit([0.0], classes=3), TaskRule.fit([0.0], classes=1)))
    assert task_of(np.array([3, 0, 2]), rule).tolist() == [1, 0, 0]


def test_first_tasks_are_what_was_said_and_known_then() -> None:
    outputs, rule = first_tasks(OUTPUTS, RULE, 1)
    assert {name: values.tolist() for name, values in outputs.items()} == {
        "logits": LOGITS[:, :2].tolist(),
        "distances": [[1, 1]] * 4,
    }
    assert (rule.tasks, rule.score, rule.alpha) == ((ONE,), "max_logit", 0.05)


@pytest.mark.parametrize(
    ("matrix", "wanted"),
    [
        ([[1.0]], 0.0),
        ([[1.0], [0.5, 0.5]], 0.5),
        # (0.9 - 0.6 + 0.8 - 0.9) / 2: the last task cannot be forgotten yet, a task that got better counts too.
        ([[0.9], [0.7, 0.8], [0.6, 0.9, 0.1]], 0.1),
    ],
)
def test_forgetting_is_the_mean_loss_since_a_task_was_learned(matrix: list[list[float]], wanted: float) -> None:
    assert forgetting(matrix) == pytest.approx(wanted)


def test_each_task_is_told_from_the_others_by_its_own_score() -> None:
    scores = as_float([[0.1, 0.9], [0.6, 0.3], [0.5, 0.2]])
    # Task 0: its images score 0.1 and 0.6, the other 0.5. Task 1: its image scores 0.2, the others 0.9 and 0.3.
    assert task_auroc(scores, np.array([0, 0, 1])) == [0.5, 1.0]


def test_a_single_task_has_none_to_be_told_from() -> None:
    assert task_auroc(as_float([[0.1], [0.2]]), np.array([0, 0])) == []


def test_unknown_metrics_by_hand() -> None:
    got = unknown_metrics(of_scores([1, 2, 3, 4]), of_scores([1.5, 5, 6]), single_task_rule([1, 2, 3, 4]))
    assert got["auroc"] == pytest.approx((1 + 4 + 4) / 12)
    # Accepting 95 % of four knowns means accepting all, up to 4: of the unknowns only 1.5 gets through.
    assert got["fpr95"] == pytest.approx(1 / 3)
    # The p-values of 1, 2, 3, 4 are 1, 0.8, 0.6, 0.4: at alpha 0.5 the fourth is called unknown.
    assert got["accepted_known"] == pytest.approx(3 / 4)
    assert got["rejected_unknown"] == pytest.approx(2 / 3)


def test_fpr95_accepts_no_more_knowns_than_it_must() -> None:
    scores = [float(number) for number in range(20)]
    # Nineteen of twenty are 95 %. Unknowns that look exactly like knowns get through as often.
    got = unknown_metrics(of_scores(scores), of_scores(scores), single_task_rule(scores))
    assert got["auroc"] == pytest.approx(0.5)
    assert got["fpr95"] == pytest.approx(0.95)


def test_a_task_without_test_images_is_not_measured() -> None:
    first = np.array([0, 1])
    outputs = {name: values[first] for name, values in OUTPUTS.items()}
    assert accuracy_matrix(outputs, RULE, first) == [[1.0], [0.5, None]]
    assert accuracy_matrix(OUTPUTS, RULE, np.array([2, 2, 2, 3]))[0] == [None]
    assert forgetting([[None], [None, 0.5], [None, 0.25, 1.0]]) == 0.25
    scores = as_float([[0.1, 0.9, 0.5], [0.6, 0.3, 0.5]])
    assert task_auroc(scores, np.array([0, 1])) == [1.0, 1.0, None]
    assert task_auroc(scores, np.array([1, 1])) == [None, None, None]
    assert mean_of([1.0, None, 0.5]) == 0.75
    assert mean_of([None]) is None
