"""Groups of unknown vectors."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from serving.bundle.pooled.grouping import NONE, USUAL_CUT, cohesion, cut_for, find_groups, nearest_group


def clouds(
    *sizes: int, noise: float = 0.5, dim: int = 96, seed: int = 0
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    random = np.random.default_rng(seed)
    truth = np.repeat(np.arange(len(sizes)), sizes)
    # At right angles, as different classes are on average.
    centers = np.sqrt(dim) * np.linalg.qr(random.standard_normal((dim, len(sizes))))[0].T
    rows = centers[truth] + noise * random.standard_normal((len(truth), dim))
    return rows / np.linalg.norm(rows, axis=1, keepdims=True), truth


def test_finds_classes_of_any_number() -> None:
    known, ids = clouds(8, 8, 8, seed=1)
    cut = cut_for(known, ids)
    for sizes in ((30,), (30, 20), (40, 12, 9, 8)):
        unit, truth = clouds(*sizes)
        groups = find_groups(unit, cut)
        assert len(np.unique(groups[groups != NONE])) == len(sizes)
        for number in range(len(sizes)):
            # The largest first.
            assert np.unique(groups[truth == number]).tolist() == [number]
        assert min(cohesion(unit, groups)) > 0.9


def test_images_that_have_nothing_in_common_form_no_group() -> None:
    unit, _ = clouds(*[1] * 40, dim=64)
    assert (find_groups(unit, 0.7) == NONE).all()
    assert nearest_group(unit, np.full(40, NONE))[0].tolist() == [NONE] * 40


def test_a_loose_image_resembles_its_class() -> None:
    unit, truth = clouds(20, 20, noise=0.5)
    groups = truth.copy()
    groups[[0, 25]] = NONE
    number, similarity = nearest_group(unit, groups)
    assert (number[0], number[25]) == (0, 1)
    assert (similarity[[0, 25]] > 0.5).all()


def test_one_known_class_gives_the_usual_cut() -> None:
    known, ids = clouds(10)
    assert cut_for(known, ids) == USUAL_CUT


def test_more_than_fit_are_joined() -> None:
    unit, truth = clouds(1500, 1500, noise=0.4)
    order = np.random.default_rng(3).permutation(3000)
    groups = find_groups(unit[order], 0.6)
    assert (groups != NONE).mean() > 0.95
    for number in (0, 1):
        assert len(np.unique(truth[order][groups == number])) == 1
