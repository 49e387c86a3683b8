"""The paper's definitions of TP on literal arrays."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from serving.bundle.decision import Rule, TaskRule
from tests.helpers import as_float
from training.learn.correction import Correction
from training.measure.task_prediction import (
    DEFINITIONS,
    ODIN,
    Definition,
    TaskPredictor,
    fit_exponents,
    log_detector,
    normalised_power,
    task_probability,
    with_settings,
    within_task,
)

TASK_OF_CLASS = np.array([0, 0, 1, 1])
LOGITS = as_float([[1.0, -1.0, 0.5, 0.0], [0.0, 2.0, 3.0, 2.9]])
RULE = Rule(alpha=0.25, tasks=(TaskRule.fit([0.0, 1.0], 2), TaskRule.fit([0.0, 1.0], 2)))


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def test_argmax_of_the_concatenation_gives_all_to_one_task() -> None:
    assert task_probability(LOGITS, TASK_OF_CLASS, DEFINITIONS["argmax"]).tolist() == [[1, 0], [0, 1]]
    assert TaskPredictor(DEFINITIONS["argmax"])({"logits": LOGITS}, RULE).class_id.tolist() == [0, 2]


def test_sigmoid_of_the_largest_logit_is_normalised() -> None:
    first, second = sigmoid(1.0), sigmoid(0.5)
    got = task_probability(LOGITS, TASK_OF_CLASS, DEFINITIONS["sigmoid"])
    assert got[0] == pytest.approx([first / (first + second), second / (first + second)])
    assert got.sum(axis=1) == pytest.approx([1, 1])


def test_largest_softmax_has_its_own_temperatures() -> None:
    # The paper's: nu is 0.1 within a task and tau 5 between them.
    own = [1 / (1 + math.exp(-2 / 5)), 1 / (1 + math.exp(-0.5 / 5))]
    got = task_probability(LOGITS, TASK_OF_CLASS, DEFINITIONS["softmax"])
    assert got[0] == pytest.approx([value / sum(own) for value in own])
    within = within_task(LOGITS, TASK_OF_CLASS, 0.1)
    assert within[1, 2] == pytest.approx(1 / (1 + math.exp(-0.1 / 0.1)))
    verdicts = TaskPredictor(DEFINITIONS["softmax"])({"logits": LOGITS}, RULE)
    assert verdicts.probability == pytest.approx(within * got[:, TASK_OF_CLASS])
    assert DEFINITIONS["softmax"] == Definition("softmax", temperature=5, nu=0.1)


def test_exponents_weigh_each_task_by_its_tau() -> None:
    taus = (0.5, 2.0)
    powers = [sigmoid(1.0) ** 2, sigmoid(0.5) ** 0.5]
    got = task_probability(LOGITS, TASK_OF_CLASS, with_settings("power", taus))
    assert got[0] == pytest.approx([value / sum(powers) for value in powers])


def test_the_first_tasks_keep_their_exponents() -> None:
    taus, rule = (0.5, 2.0), Rule(tasks=RULE.tasks[:1])
    assert TaskPredictor(with_settings("power", taus))({"logits": LOGITS[:, :2]}, rule).p_task.tolist() == [[1], [1]]


@given(arrays(np.float64, (3, 4), elements=st.floats(-30, 30)))
def test_small_exponents_tend_to_the_concatenated_argmax(logits: np.ndarray) -> None:
    """The extension theorem: tau near 0 leaves the task of the largest logit."""
    best = np.sort(np.stack([logits[:, :2].max(axis=1), logits[:, 2:].max(axis=1)], axis=1), axis=1)
    clear = best[:, 1] - best[:, 0] > 0.01
    limit, near = (
        task_probability(logits[clear], TASK_OF_CLASS, definition)
        for definition in (DEFINITIONS["argmax"], with_settings("power", [1e-18]))
    )
    np.testing.assert_allclose(near, limit, atol=1e-3)


@given(arrays(np.float64, (4, 4), elements=st.floats(-50, 50)), st.sampled_from(sorted(DEFINITIONS)))
def test_every_definition_is_a_distribution_over_classes(logits: np.ndarray, name: str) -> None:
    verdicts = TaskPredictor(DEFINITIONS[name])({"logits": logits}, RULE)
    np.testing.assert_allclose(verdicts.probability.sum(axis=1), 1)
    assert (verdicts.probability >= 0).all()
    assert (verdicts.task == TASK_OF_CLASS[verdicts.class_id]).all()


def test_odin_lets_the_largest_probability_win() -> None:
    logits = as_float([[5.0, 4.9, 1.0, -9.0]])
    assert TaskPredictor(DEFINITIONS["argmax"])({"logits": logits}, RULE).class_id.tolist() == [0]
    assert TaskPredictor(ODIN)({"logits": logits}, RULE).class_id.tolist() == [2]


def test_corrections_are_those_of_as_many_tasks_as_were_learned() -> None:
    history = ((Correction(1, 0),), (Correction(1, 0), Correction(10, 0)))
    predictor = TaskPredictor(DEFINITIONS["argmax"], history)
    assert predictor({"logits": LOGITS}, RULE).class_id.tolist() == [2, 2]
    first = Rule(tasks=RULE.tasks[:1])
    assert predictor({"logits": LOGITS[:, :2]}, first).class_id.tolist() == [0, 1]


def test_p_values_are_ranks_among_validation_images() -> None:
    validation = as_float([[value, -9, -9, -9] for value in (1, 2, 3)])
    predictor = TaskPredictor(DEFINITIONS["argmax"]).with_memory({"logits": validation}, RULE)
    verdicts = predictor({"logits": as_float([[2.5, -9, -9, -9], [-9, -9, 0.5, -9]])}, RULE)
    # Of the three validation logits, two are at most 2.5, and none is at most 0.5.
    assert verdicts.p_value.tolist() == [0.75, 0.25]
    assert verdicts.known.tolist() == [True, True]
    strict = RULE.model_copy(update={"alpha": 0.9})
    assert predictor({"logits": LOGITS}, strict).known.tolist() == [False, True]


def test_fitted_exponents_trust_the_task_that_knows_its_own() -> None:
    generator = np.random.default_rng(0)
    tasks = np.repeat([0, 1], 50)
    # Task 0 separates its images from others weakly; task 1 has the same outputs for all images.
    logits = np.zeros((100, 4))
    logits[:, 0] = np.where(tasks == 0, 3.0, 2.5) + generator.normal(0, 0.05, 100)
    logits[:, 2] = 2.75
    detected = log_detector(logits, TASK_OF_CLASS, DEFINITIONS["sigmoid"])
    taus = fit_exponents(detected, tasks)

    def cost(taus: tuple[float, ...]) -> float:
        return float(-np.log(normalised_power(detected, taus)[np.arange(100), tasks]).mean())

    assert cost(taus) < 0.1 < cost((1.0, 1.0))


@pytest.mark.parametrize(
    ("name", "taus", "nu"), [("argmax", [1.0], None), ("sigmoid", [2.0], None), ("softmax", [1.0, 2.0], None)]
)
def test_parameters_that_a_definition_does_not_have_are_refused(name: str, taus: list[float], nu: float | None) -> None:
    with pytest.raises(ValueError, match=f"{name} has"):
        with_settings(name, taus, nu)


def test_temperatures_must_be_positive() -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        with_settings("power", [0.0])
