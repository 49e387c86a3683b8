"""The theorems hold for any probabilities, and the losses equal those computed by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.measure import theory
from training.measure.task_prediction import normalised_power
from training.measure.theory import DetectorProbabilities, Floats

SLACK = 1e-9
"""Tolerance for rounding: a bound and the bounded value are computed in different ways."""


class Model:
    """A model of a few tasks on a few images: WP, TP and detectors are drawn independently."""

    def __init__(self, seed: int, sharpness: float, classes: list[int], temperature: float) -> None:
        draw = np.random.default_rng(seed)
        images = 12
        self.task_of_class = np.repeat(np.arange(len(classes)), classes)
        self.class_ids = draw.integers(0, len(self.task_of_class), images)
        self.tasks = self.task_of_class[self.class_ids]
        raised = np.exp(sharpness * draw.normal(size=(images, len(self.task_of_class))))
        sums = np.stack([raised[:, self.task_of_class == task].sum(axis=1) for task in range(len(classes))], axis=1)
        self.p_within_task = raised / sums[:, self.task_of_class]
        self.p_task = normalised_power(sharpness * draw.normal(size=(images, len(classes))), (1.0,))
        self.detectors = DetectorProbabilities.of_log_odds(sharpness * draw.normal(size=(images, len(classes))))
        self.p_class = raised / raised.sum(axis=1, keepdims=True)
        self.temperatures = temperature * np.exp(draw.normal(size=len(classes)) / 2)

    def losses(self, p_task: Floats, detectors: DetectorProbabilities) -> theory.Losses:
        return theory.losses(self.p_within_task, p_task, detectors, self.class_ids, self.task_of_class)

    def tasks_from_detectors(self, *temperatures: float) -> Floats:
        """The TP that the detectors imply: P'_k ** (1 / tau_k), normalised."""
        return normalised_power(self.detectors.log_in, temperatures)


models = st.builds(
    Model,
    seed=st.integers(0, 2**32 - 1),
    sharpness=st.floats(0.01, 20),
    classes=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    temperature=st.floats(0.3, 4),
)
for_any_model = settings(max_examples=30, deadline=None)


@for_any_model
@given(models)
def test_theorem_1_cil_loses_what_wp_and_tp_lose(model: Model) -> None:
    lost = model.losses(model.p_task, model.detectors)
    assert lost.cil == pytest.approx(theory.cil_bound(lost.wp, lost.tp))
    # And in the mean over images (the corollary).
    assert lost.cil.mean() == pytest.approx(lost.wp.mean() + lost.tp.mean())


@for_any_model
@given(models)
def test_theorem_2_a_good_tp_is_a_good_detector_for_each_task(model: Model) -> None:
    lost = model.losses(model.p_task, theory.detectors_from_tasks(model.p_task))
    assert (lost.ood <= theory.detector_bound(lost.tp)[:, None] + SLACK).all()
    assert theory.detector_bound(lost.tp) == pytest.approx(lost.tp)


@for_any_model
@given(models)
def test_theorem_2_good_detectors_are_a_good_tp(model: Model) -> None:
    lost = model.losses(model.tasks_from_detectors(1.0), model.detectors)
    assert (lost.tp <= theory.tp_bound(lost.ood, model.tasks) + SLACK).all()


@for_any_model
@given(models)
def test_theorem_3_good_wp_and_good_detectors_are_a_good_cil(model: Model) -> None:
    lost = model.losses(model.tasks_from_detectors(1.0), model.detectors)
    assert (lost.cil <= theory.cil_bound_of_detectors(lost.wp, lost.ood, model.tasks) + SLACK).all()


@for_any_model
@given(models)
def test_theorem_4_a_good_cil_has_a_good_wp_a_good_tp_and_good_detectors(model: Model) -> None:
    # A CIL model without WP and TP implies both: TP sums over a task, and WP divides by it.
    tasks = [model.p_class[:, model.task_of_class == task].sum(axis=1) for task in np.unique(model.task_of_class)]
    p_task = np.stack(tasks, axis=1)
    p_within_task = model.p_class / np.maximum(p_task, theory.SMALLEST)[:, model.task_of_class]
    implied = theory.detectors_from_tasks(p_task)
    lost = theory.losses(p_within_task, p_task, implied, model.class_ids, model.task_of_class)
    own = model.p_class[np.arange(len(model.class_ids)), model.class_ids]
    assert lost.cil == pytest.approx(-np.log(own))
    for part in (lost.wp, lost.tp, lost.ood.max(axis=1)):
        assert (part <= lost.cil + SLACK).all()


@for_any_model
@given(models)
def test_the_extension_a_tp_is_a_detector_at_any_temperature(model: Model) -> None:
    lost = model.losses(model.p_task, theory.detectors_from_tasks(model.p_task, model.temperatures))
    assert (lost.ood <= theory.detector_bound(lost.tp, model.temperatures) * (1 + SLACK) + SLACK).all()


@for_any_model
@given(models)
def test_the_extension_detectors_are_a_tp_at_any_temperature(model: Model) -> None:
    lost = model.losses(model.tasks_from_detectors(*model.temperatures), model.detectors)
    assert (lost.tp <= theory.tempered_tp_bound(lost.ood, model.tasks, model.temperatures) * (1 + SLACK) + SLACK).all()


def test_a_temperature_near_zero_leaves_the_task_of_the_largest_detector() -> None:
    log_in = np.log([[0.6, 0.9, 0.8]])
    assert normalised_power(log_in, (0.01,))[0] == pytest.approx([0, 1, 0], abs=1e-4)


def test_losses_by_hand() -> None:
    # Two tasks of two classes; the image is of class 2, which is in task 1.
    p_within_task = np.array([[0.9, 0.1, 0.25, 0.75]])
    p_task, p_in = np.array([[0.5, 0.5]]), np.array([[0.2, 0.4]])
    lost = theory.losses(p_within_task, p_task, DetectorProbabilities.of(p_in), np.array([2]), np.array([0, 0, 1, 1]))
    assert lost.wp == pytest.approx(np.log(4))
    assert lost.tp == pytest.approx(np.log(2))
    assert lost.cil == pytest.approx(np.log(8))
    assert lost.ood[0] == pytest.approx([-np.log(0.8), -np.log(0.4)])
    # 1 - e^-delta is 0.2 for task 0 and 0.6 for task 1, whose own e^delta is 1 / 0.4.
    assert theory.tp_bound(lost.ood, np.array([1])) == pytest.approx(0.8 / 0.4)
    assert theory.cil_bound_of_detectors(lost.wp, lost.ood, np.array([1])) == pytest.approx(np.log(4) + 2)
    # At tau = 1/2 the wrong shares are 0.04 and 0.36.
    assert theory.tempered_tp_bound(lost.ood, np.array([1]), 0.5) == pytest.approx(-2 * np.log(0.4) + 0.4 / 0.64)
    assert theory.detector_bound(lost.tp, 0.5) == pytest.approx(2 * np.log(2))
    assert theory.detector_bound(lost.tp, 2.0) == pytest.approx(-np.log(1 - np.sqrt(0.5)))


def test_a_probability_that_was_rounded_to_zero_or_one_loses_much_and_not_infinitely() -> None:
    p_within_task, certain = np.array([[0.0, 1.0, 1.0]]), np.array([[0.0, 1.0]])
    lost = theory.losses(p_within_task, certain, DetectorProbabilities.of(certain), np.array([0]), np.array([0, 0, 1]))
    for part in lost:
        assert np.isfinite(part).all()
        assert (part > 30).all()


def test_the_odds_of_a_detector_lose_exactly_where_its_probability_is_rounded_to_one() -> None:
    lost = theory.detector_losses(
        DetectorProbabilities.of_log_odds(np.array([[50.0, 50.0], [-1000.0, 0.0]])), np.array([0, 0])
    )
    assert lost == pytest.approx(np.array([[np.exp(-50), 50.0], [-np.log(theory.SMALLEST), np.log(2)]]))


@pytest.mark.parametrize("tau", [1.0, 0.3, 3.0])
def test_a_task_that_is_surely_wrong_is_within_its_bound(tau: float) -> None:
    odds = np.linspace(0, 200, 400)
    p_task = normalised_power(np.stack([0 * odds, -odds], axis=1), (1.0,))
    tasks = np.ones(400, dtype=int)
    lost = theory.detector_losses(theory.detectors_from_tasks(p_task, tau), tasks)
    bound = theory.detector_bound(-np.log(p_task[:, 1]), tau)
    assert (lost <= (bound * (1 + SLACK) + SLACK)[:, None]).all()
    assert lost.max(axis=1) == pytest.approx(bound)
