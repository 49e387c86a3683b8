from __future__ import annotations

import numpy as np
import torch

from tests.helpers import as_float
from training.learn.correction import Correction, corrected, fit_corrections

TASK_OF_CLASS = np.array([0, 0, 1, 1, 1])


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


def cross_entropy(logits: np.ndarray, class_ids: np.ndarray) -> float:
    moved = logits - logits.max(axis=1, keepdims=True)
    return float(np.mean(np.log(np.exp(moved).sum(axis=1)) - moved[np.arange(len(moved)), class_ids]))


def test_the_steps_are_those_of_the_authors() -> None:
    """The same numbers by torch's SGD: 160 steps of 0.01 with momentum 0.8, on 15 images of each task."""
    logits, class_ids = draw(60)
    generator = np.random.default_rng(0)
    numbers = torch.tensor(generator.random(4), requires_grad=True)
    optimizer = torch.optim.SGD([numbers], lr=0.01, momentum=0.8)
    owned = [np.flatnonzero(class_ids < 2), np.flatnonzero(class_ids >= 2)]
    for _ in range(160):
        rows = np.concatenate([generator.permutation(own)[:15] for own in owned])
        scale, shift = numbers.view(2, 2)[:, TASK_OF_CLASS]
        moved = torch.tensor(logits[rows]) * scale + shift
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(moved, torch.tensor(class_ids[rows])).backward()
        optimizer.step()
    found = np.array(fit_corrections(logits, class_ids, TASK_OF_CLASS))
    np.testing.assert_allclose(found, numbers.detach().numpy().reshape(2, 2).T, rtol=1e-9)


def test_a_correction_lowers_the_cross_entropy_of_other_images() -> None:
    corrections = fit_corrections(*draw(40), TASK_OF_CLASS)
    logits, class_ids = draw(2000, seed=1)
    moved = corrected(logits, corrections, TASK_OF_CLASS)
    assert cross_entropy(moved, class_ids) < 0.7 * cross_entropy(logits, class_ids)


def test_tasks_on_different_scales_are_made_comparable() -> None:
    logits, class_ids = draw()
    corrections = fit_corrections(logits, class_ids, TASK_OF_CLASS)
    before = (logits.argmax(axis=1) == class_ids).mean()
    after = (corrected(logits, corrections, TASK_OF_CLASS).argmax(axis=1) == class_ids).mean()
    assert after > before + 0.1
    assert corrections[0].scale > 2 * corrections[1].scale


def test_tasks_without_a_mistake_get_finite_numbers() -> None:
    logits = 50 * np.eye(5)
    corrections = fit_corrections(logits, np.arange(5), TASK_OF_CLASS)
    assert np.isfinite(np.array(corrections)).all()


def test_a_single_task_is_fitted_too() -> None:
    logits, class_ids = draw()
    own = class_ids < 2
    (only,) = fit_corrections(logits[own][:, :2], class_ids[own], np.array([0, 0]))
    assert only.scale > 0
