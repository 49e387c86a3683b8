from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from training.measure import grouping
from training.measure.grouping import NONE, cohesion, find_groups

SIZES = (60, 40, 30)


def blobs(*sizes: int, apart: float = 12.0, dimensions: int = 20, seed: int = 0) -> NDArray[np.float64]:
    """Gaussian clusters at the given distance (a point is about 4.5 from the centre of its cluster)."""
    generator = np.random.default_rng(seed)
    middles = np.eye(max(len(sizes), 1), dimensions) * apart
    return np.concatenate(
        [middle + generator.normal(size=(size, dimensions)) for middle, size in zip(middles, sizes, strict=False)]
    )


def strays(count: int, dimensions: int = 20, seed: int = 1) -> NDArray[np.float64]:
    """Points far from every cluster and from each other."""
    return np.random.default_rng(seed).normal(size=(count, dimensions)) * 30


def sizes_of(groups: NDArray[np.int64]) -> list[int]:
    return sorted(np.bincount(groups[groups != NONE]).tolist(), reverse=True)


def test_clouds_are_groups_and_what_lies_elsewhere_is_none() -> None:
    groups = find_groups(np.concatenate([blobs(*SIZES), strays(8)]))
    assert (groups[-8:] == NONE).all()
    truth = np.repeat(range(3), SIZES)
    found = groups[:-8]
    for number in range(3):
        members = truth[found == number]
        assert len(members) >= 0.9 * SIZES[members[0]]
        assert len(set(members.tolist())) == 1
    assert sorted(set(found.tolist()) - {NONE}) == [0, 1, 2]


def test_points_at_the_rim_join_the_group_of_their_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = np.random.default_rng(2).uniform(0.4, 1.8, size=(100, 1))
    points = blobs(60, 40, apart=0.0) * wide + np.repeat(np.eye(2, 20) * 6, (60, 40), axis=0)
    inside = (find_groups(points) != NONE).sum()
    monkeypatch.setattr(grouping, "REACH", 0.0)
    assert inside > 1.1 * (find_groups(points) != NONE).sum()


def test_one_cloud_is_one_group() -> None:
    assert len(sizes_of(find_groups(blobs(80)))) == 1
    (size,) = sizes_of(find_groups(np.concatenate([blobs(80), strays(5)])))
    assert size >= 40


def test_clouds_that_touch_are_one_group() -> None:
    assert len(sizes_of(find_groups(blobs(60, 60, apart=1.0)))) <= 1
    assert len(sizes_of(find_groups(blobs(60, 60, apart=12.0)))) == 2


@pytest.mark.parametrize("count", [0, 1, 2, 5, 9, 15])
def test_a_few_images_are_no_group(count: int) -> None:
    assert (find_groups(strays(count) if count else np.empty((0, 20))) == NONE).all()


def test_a_group_is_as_large_as_asked_for() -> None:
    points = blobs(60, 40, 14)
    assert len(sizes_of(find_groups(points, min_size=10))) == 3
    assert len(sizes_of(find_groups(points, min_size=20))) == 2


def test_images_that_are_all_the_same_do_no_harm() -> None:
    assert len(sizes_of(find_groups(np.ones((40, 8))))) <= 1


def test_of_many_images_a_sample_is_grouped_and_the_others_join(monkeypatch: pytest.MonkeyPatch) -> None:
    points = np.concatenate([blobs(150, 120), strays(10)])
    monkeypatch.setattr(grouping, "MOST", 100)
    groups = find_groups(points)
    assert [set(groups[:150].tolist()) - {NONE}, set(groups[150:270].tolist()) - {NONE}] in ([{0}, {1}], [{1}, {0}])
    assert (groups[:270] != NONE).mean() > 0.9
    assert (groups[270:] == NONE).all()


def test_the_same_images_give_the_same_groups() -> None:
    points = blobs(*SIZES, apart=6.0)
    assert find_groups(points).tolist() == find_groups(points.copy()).tolist()


def test_cohesion_is_the_share_of_neighbours_in_the_group() -> None:
    line = np.array([[0.0], [1], [2], [3], [4], [5], [100], [101], [102], [103], [104], [105]])
    groups = np.repeat([0, 1], 6)
    assert cohesion(line, groups) == [1.0, 1.0]
    mixed = np.tile([0, 1], 6)
    assert all(0.3 < value < 0.5 for value in cohesion(line, mixed))
    assert cohesion(line, np.full(12, NONE)) == []
