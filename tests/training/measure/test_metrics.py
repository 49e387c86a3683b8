from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import average_precision_score

from serving.bundle.decision import Outputs, Rule, TaskRule, Verdicts, judge
from tests.helpers import as_float
from training.measure.metrics import (
    UnknownMetrics,
    accuracy_matrix,
    after_each_task,
    average_incremental_accuracy,
    calibration_error,
    first_tasks,
    forgetting,
    mean_of,
    oscr,
    right_within_task,
    stages,
    task_auroc,
    task_of,
    unknown_metrics,
)

ONE = TaskRule.fit([0.0], classes=2)
RULE = Rule(score="max_logit", alpha=0.05, tasks=(ONE, ONE))
LOGITS = as_float([[5, 0, 1, 1], [0, 5, 9, 0], [0, 0, 5, 0], [9, 0, 0, 5]])
"""Logits of one image per class; the second and the fourth are closer to the other task."""
OUTPUTS = {"logits": LOGITS, "distances": -LOGITS}
CLASS_IDS = np.arange(4)


def of_scores(scores: list[float]) -> dict[str, np.ndarray]:
    """Outputs of a task with a single class, with the given unknown scores."""
    distances = as_float(scores)[:, None]
    return {"logits": np.zeros_like(distances), "distances": distances}


def metrics_of(known: list[float], unknown: list[float], rule: Rule) -> UnknownMetrics:
    return unknown_metrics(
        judge(of_scores(known), rule), judge(of_scores(unknown), rule), np.zeros(len(known), dtype=int)
    )


def single_task_rule(validation_scores: list[float]) -> Rule:
    return Rule(score="max_logit", alpha=0.5, tasks=(TaskRule.fit(validation_scores, classes=1),))


def test_accuracy_matrix_has_a_row_for_each_task_learned() -> None:
    assert accuracy_matrix(stages(OUTPUTS, RULE, CLASS_IDS)) == [[1.0], [0.5, 0.5]]


def test_accuracy_within_the_task_is_given_the_task() -> None:
    assert right_within_task(judge(OUTPUTS, RULE), RULE, CLASS_IDS).all()
    wrong = judge({**OUTPUTS, "logits": LOGITS[[1, 0, 2, 3]]}, RULE)
    assert right_within_task(wrong, RULE, CLASS_IDS).tolist() == [False, False, True, True]


def test_task_of_a_class() -> None:
    rule = Rule(tasks=(TaskRule.fit([0.0], classes=3), TaskRule.fit([0.0], classes=1)))
    assert task_of(np.array([3, 0, 2]), rule).tolist() == [1, 0, 0]


def test_first_tasks_keeps_only_the_outputs_and_rules_of_those_tasks() -> None:
    outputs, rule = first_tasks(OUTPUTS, RULE, 1)
    assert {name: values.tolist() for name, values in outputs.items()} == {
        "logits": LOGITS[:, :2].tolist(),
        "distances": (-LOGITS[:, :2]).tolist(),
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


def test_each_task_is_separated_from_the_others_by_its_own_score() -> None:
    scores = as_float([[0.1, 0.9], [0.6, 0.3], [0.5, 0.2]])
    # Task 0: its images score 0.1 and 0.6, the other 0.5. Task 1: its image scores 0.2, the others 0.9 and 0.3.
    assert task_auroc(scores, np.array([0, 0, 1])) == [0.5, 1.0]


def test_a_single_task_has_no_auroc_against_others() -> None:
    assert task_auroc(as_float([[0.1], [0.2]]), np.array([0, 0])) == []


def test_unknown_metrics_by_hand() -> None:
    got = metrics_of([1, 2, 3, 4], [1.5, 5, 6], single_task_rule([1, 2, 3, 4]))
    assert got["auroc"] == pytest.approx((1 + 4 + 4) / 12)
    # Accepting 95 % of four knowns means accepting all, up to 4: of the unknowns only 1.5 gets through.
    assert got["fpr95"] == pytest.approx(1 / 3)
    # Unknowns found, most unknown first: 6, 5, then 1.5 after the knowns 4, 3, 2.
    assert got["aupr"] == pytest.approx((1 / 1 + 2 / 2 + 3 / 6) / 3)
    # Knowns found, least unknown first: 1, then 2, 3, 4 after the unknown 1.5.
    assert got["aupr_known"] == pytest.approx((1 / 1 + 2 / 3 + 3 / 4 + 4 / 5) / 4)
    # One class, so all knowns are classified right.
    assert got["oscr"] == pytest.approx(got["auroc"])
    # The p-values of 1, 2, 3, 4 are 1, 0.8, 0.6, 0.4: at alpha 0.5 the fourth is called unknown.
    assert got["accepted_known"] == pytest.approx(3 / 4)
    assert got["rejected_unknown"] == pytest.approx(2 / 3)


def test_fpr95_accepts_no_more_knowns_than_it_must() -> None:
    scores = [float(number) for number in range(20)]
    # Nineteen of twenty are 95 %. Unknowns with the scores of knowns are accepted as often.
    got = metrics_of(scores, scores, single_task_rule(scores))
    assert got["auroc"] == pytest.approx(0.5)
    assert got["fpr95"] == pytest.approx(0.95)


def test_what_a_task_forgets_itself_is_not_counted_as_lost_to_newer_classes() -> None:
    """Outputs that changed since the first task was learned: one of its two images is now wrong within the task."""
    at_first = {name: values.copy() for name, values in OUTPUTS.items()}
    at_first["logits"][:2, :2] = [[9.0, 0.0], [0.0, 9.0]]
    now = {name: values.copy() for name, values in at_first.items()}
    now["logits"][1, :2] = [9.0, 0.0]
    none = {name: values[:0] for name, values in OUTPUTS.items()}
    every = stages(OUTPUTS, RULE, CLASS_IDS, outputs_after=lambda count: (at_first if count == 1 else now, none))
    matrix = accuracy_matrix(every)
    last = after_each_task(every, matrix)[-1]
    assert last["forgetting_within_tasks"] == 0.5
    assert last["lost_to_newer_classes"] == pytest.approx(forgetting(matrix) - 0.5)


def test_a_task_without_test_images_is_not_measured() -> None:
    first = np.array([0, 1])
    outputs = {name: values[first] for name, values in OUTPUTS.items()}
    assert accuracy_matrix(stages(outputs, RULE, first)) == [[1.0], [0.5, None]]
    assert accuracy_matrix(stages(OUTPUTS, RULE, np.array([2, 2, 2, 3])))[0] == [None]
    assert forgetting([[None], [None, 0.5], [None, 0.25, 1.0]]) == 0.25
    scores = as_float([[0.1, 0.9, 0.5], [0.6, 0.3, 0.5]])
    assert task_auroc(scores, np.array([0, 1])) == [1.0, 1.0, None]
    assert task_auroc(scores, np.array([1, 1])) == [None, None, None]
    assert mean_of([1.0, None, 0.5]) == 0.75
    assert mean_of([None]) is None


def test_accuracies_after_each_task() -> None:
    # The second task has a class that resembles one of the two unknown images.
    rule = Rule(alpha=0.3, tasks=(TaskRule.fit([-4.0, -3.0, -2.0, -1.0], classes=2),) * 2)
    unknown = {name: np.array([[9.0, 9.0, -3.0, 9.0], [9.0, 9.0, 9.0, 9.0]]) for name in OUTPUTS}
    every = stages(OUTPUTS, rule, CLASS_IDS, judge, unknown)
    accuracies = after_each_task(every, accuracy_matrix(every))
    names = (
        *("cil_accuracy", "til_accuracy", "tp_accuracy", "forgetting_within_tasks", "lost_to_newer_classes"),
        *("accepted_known", "accepted_known_per_task", "accepted_known_lowest", "rejected_unknown"),
    )
    assert [tuple(each) for each in accuracies] == [names, names]
    assert [tuple(each.values()) for each in accuracies] == [
        (1, 1, 1, 0, 0, 1, [1], 1, 1),
        (0.5, 1, 0.5, 0, 0.5, 1, [1, 1], 1, 0.5),
    ]
    every = stages(OUTPUTS, rule, CLASS_IDS)
    assert after_each_task(every, accuracy_matrix(every))[1]["rejected_unknown"] is None
    assert average_incremental_accuracy(accuracies) == 0.75


def test_the_share_of_each_task_is_beside_that_of_all() -> None:
    """One task accepts half of its images: over all tasks that is a quarter less, which may hide among many."""

    def decide(outputs: Outputs, rule: Rule) -> Verdicts:
        known = np.array([True, True, True, False])
        return judge(outputs, rule)._replace(known=known[: len(outputs["logits"])])

    every = stages(OUTPUTS, RULE, CLASS_IDS, decide)
    first, last = after_each_task(every, accuracy_matrix(every))
    assert first["accepted_known_per_task"] == [1.0]
    assert last["accepted_known"] == 0.75
    assert last["accepted_known_per_task"] == [1.0, 0.5]
    assert last["accepted_known_lowest"] == 0.5
    untested = stages({name: values[2:] for name, values in OUTPUTS.items()}, RULE, CLASS_IDS[2:])
    first, last = after_each_task(untested, accuracy_matrix(untested))
    assert (first["accepted_known_per_task"], first["accepted_known_lowest"]) == ([None], None)
    assert last["accepted_known_per_task"][0] is None


def test_the_average_leaves_out_what_could_not_be_tested() -> None:
    every = stages({name: values[2:] for name, values in OUTPUTS.items()}, RULE, CLASS_IDS[2:])
    accuracies = after_each_task(every, accuracy_matrix(every))
    assert accuracies[0]["cil_accuracy"] is None
    assert average_incremental_accuracy(accuracies) == accuracies[1]["cil_accuracy"] == 0.5


def test_accuracy_within_the_task_equals_a_decision_within_it() -> None:
    draw = np.random.default_rng(0)
    logits, class_ids = draw.normal(size=(50, 4)), draw.integers(0, 4, 50)
    outputs = {"logits": logits, "distances": -logits}
    given = [judge(outputs, RULE, given_task=task).class_id for task in range(2)]
    right = np.choose(task_of(class_ids, RULE), given) == class_ids
    assert right_within_task(judge(outputs, RULE), RULE, class_ids).tolist() == right.tolist()
    assert not right.all()


def test_calibration_error_by_hand() -> None:
    # Of ten answers given with 0.75, five are right; of ten given with 1.0, all are.
    confidence, right = np.repeat([0.75, 1.0], 10), np.array([True, False] * 5 + [True] * 10)
    assert calibration_error(confidence, right) == pytest.approx(0.25 / 2)
    # In one bin the two errors are one: 0.875 against 0.75.
    assert calibration_error(confidence, right, bins=1) == pytest.approx(0.125)
    assert calibration_error(np.array([0.6, 0.9]), np.array([True, False]), bins=2) == pytest.approx(0.25)
    assert calibration_error(np.array([0.0]), np.array([False])) == 0.0


def test_oscr_is_the_area_under_right_and_accepted_over_unknowns_accepted() -> None:
    draw = np.random.default_rng(1)
    known, right, unknown = draw.integers(0, 9, 40), draw.random(40) < 0.7, draw.integers(3, 14, 30)
    levels = [-1, *range(14)]
    accepted_right = [np.mean((known <= level) & right) for level in levels]
    accepted_unknown = [np.mean(unknown <= level) for level in levels]
    assert oscr(as_float(known), right, as_float(unknown)) == pytest.approx(
        np.trapezoid(accepted_right, accepted_unknown)
    )
    assert oscr(as_float(known), np.zeros(40, dtype=bool), as_float(unknown)) == 0.0
    # With perfect separation it equals the accuracy.
    assert oscr(as_float(known), right, as_float(unknown) + 9) == pytest.approx(right.mean())


def test_aupr_counts_unknown_as_positive() -> None:
    rule = single_task_rule([1, 2, 3, 4])
    got = metrics_of([1, 2, 3, 4], [3.5] * 12, rule)
    scores = [1, 2, 3, 4] + [3.5] * 12
    assert got["aupr"] == pytest.approx(average_precision_score([0] * 4 + [1] * 12, scores))
    assert got["aupr"] != pytest.approx(got["aupr_known"])
