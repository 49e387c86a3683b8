from __future__ import annotations

import numpy as np
import pytest

from tests.helpers import as_float
from training.calibration import RIDGE, Correction, _cross_entropy, corrected, fit_corrections

TASK_OF_CLASS = np.array([0, 0, 1, 1, 1])
MEMBER = np.eye(2)[TASK_OF_CLASS]


def draw(count: int = 200, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Logits of two tasks, the second on a scale of its own, and classes that they are often right about."""
    generator = np.random.default_rng(seed)
    class_ids = generator.integers(0, 5, count)
    logits = generator.normal(size=(count, 5))
    logits[np.arange(count), class_ids] += 1.5
    logits[:, 2:] = 6 * logits[:, 2:] + 4
    return logits, class_ids


def test_corrected_scales_and_shifts_each_task() -> None:
    got = corrected(as_float([[1, 2, 3, 4, 5]]), [Correction(2, 1), Correction(-1, 10)], TASK_OF_CLASS)
    assert got.tolist() == [[3, 5, 7, 6, 5]]


def test_gradient_and_hessian_are_those_of_the_loss() -> None:
    logits, class_ids = draw(30)
    at = np.array([0.7, 1.3, -0.4, 0.2])
    _, slope, curvature = _cross_entropy(at, logits, class_ids, MEMBER)
    for place, step in enumerate(np.eye(4) * 1e-5):
        higher, lower = (_cross_entropy(at + sign * step, logits, class_ids, MEMBER) for sign in (1, -1))
        assert slope[place] == pytest.approx((higher[0] - lower[0]) / 2e-5, abs=1e-7)
        np.testing.assert_allclose(curvature[place], (higher[1] - lower[1]) / 2e-5, atol=1e-6)


def test_the_solver_ends_where_the_gradient_vanishes() -> None:
    logits, class_ids = draw()
    found = np.array(fit_corrections(logits, class_ids, TASK_OF_CLASS)).T.ravel()
    assert np.abs(_cross_entropy(found, logits, class_ids, MEMBER)[1]).max() < 1e-8


def test_tasks_on_different_scales_are_made_comparable() -> None:
    logits, class_ids = draw()
    corrections = fit_corrections(logits, class_ids, TASK_OF_CLASS)
    before = (logits.argmax(axis=1) == class_ids).mean()
    after = (corrected(logits, corrections, TASK_OF_CLASS).argmax(axis=1) == class_ids).mean()
    assert after > before + 0.1
    assert corrections[0].scale / corrections[1].scale == pytest.approx(6, rel=0.5)


def test_tasks_without_a_mistake_get_finite_numbers() -> None:
    logits = 50 * np.eye(5)
    corrections = fit_corrections(logits, np.arange(5), TASK_OF_CLASS)
    assert np.isfinite(np.array(corrections)).all()
    assert RIDGE > 0


def test_a_single_task_is_fitted_too() -> None:
    logits, class_ids = draw()
    own = class_ids < 2
    (only,) = fit_corrections(logits[own][:, :2], class_ids[own], np.array([0, 0]))
    assert only.scale > 0
    assert only.shift == pytest.approx(0, abs=1e-6)
