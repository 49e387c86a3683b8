"""Pooled statistics add up exactly: order, tasks and removed classes leave no trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from serving.bundle.pooled import (
    Detector,
    PooledClassifier,
    PooledSettings,
    Projection,
    Standardised,
    Statistics,
    StatisticsError,
)
from serving.bundle.pooled import statistics as module
from serving.bundle.pooled.settings import UNKNOWN_SCORES
from serving.bundle.pooled.solution import Solution

DIM = 24
PROJECTIONS = (Projection(DIM, 0), Projection(DIM, 32))
EVERY_SCORE = PooledSettings(expanded=True, unknown=tuple(Standardised(name=name) for name in UNKNOWN_SCORES))

Task = tuple[NDArray[np.float64], NDArray[np.int64]]


def make_task(seed: int, classes: list[int], images: int) -> Task:
    """Unit vectors around one random direction per class, shuffled."""
    rng = np.random.default_rng(seed)
    ids = rng.permutation(np.repeat(classes, images))
    centers = {each: np.random.default_rng(1000 + each).normal(size=DIM) for each in classes}
    rows = np.stack([centers[each] for each in ids.tolist()]) + rng.normal(size=(len(ids), DIM))
    return rows / np.linalg.norm(rows, axis=1, keepdims=True), ids


def gather(tasks: list[Task], projection: Projection) -> Statistics:
    statistics = Statistics(projection)
    for task in tasks:
        statistics.add(*task)
    return statistics


def assert_same(one: Statistics, other: Statistics, tolerance: float = 1e-9) -> None:
    assert one.class_ids.tolist() == other.class_ids.tolist()
    assert one.counts.tolist() == other.counts.tolist()
    np.testing.assert_allclose(one.sums, other.sums, atol=tolerance)
    np.testing.assert_allclose(one.gram, other.gram, atol=tolerance)


tasks_strategy = st.lists(
    st.tuples(
        st.integers(0, 10_000), st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True), st.integers(1, 6)
    ),
    min_size=2,
    max_size=4,
)


@settings(deadline=None, max_examples=30)
@given(tasks_strategy, st.randoms(use_true_random=False), st.sampled_from(PROJECTIONS))
def test_the_order_of_tasks_does_not_matter(drawn: Any, random: Any, projection: Projection) -> None:
    tasks = [make_task(*each) for each in drawn]
    shuffled = random.sample(tasks, len(tasks))
    one, other = gather(tasks, projection), gather(shuffled, projection)
    assert_same(one, other)
    together = Statistics.of(*(np.concatenate(parts) for parts in zip(*shuffled, strict=True)), projection)
    assert_same(one, together)
    images = make_task(7, [0, 3], 4)[0]
    for answers in (
        [each(statistics)(images) for statistics in (one, other, together)] for each in (logits, distances)
    ):
        for another in answers[1:]:
            np.testing.assert_allclose(another, answers[0], atol=1e-6 * max(1.0, np.abs(answers[0]).max()))


def logits(statistics: Statistics) -> Callable[[NDArray[Any]], NDArray[Any]]:
    return PooledClassifier.fit(statistics, EVERY_SCORE).logits


def distances(statistics: Statistics) -> Callable[[NDArray[Any]], NDArray[Any]]:
    solution = Solution.of(statistics, EVERY_SCORE)
    return Detector.of(solution, EVERY_SCORE.unknown, statistics.class_ids).distances


@settings(deadline=None, max_examples=30)
@given(tasks_strategy, st.sampled_from(PROJECTIONS))
def test_a_class_taken_out_leaves_no_trace(drawn: Any, projection: Projection) -> None:
    tasks = [make_task(*each) for each in drawn]
    vectors, ids = (np.concatenate(parts) for parts in zip(*tasks, strict=True))
    class_id = int(ids[0])
    mine = ids == class_id
    rest = Statistics.of(vectors, ids, projection).without(class_id, vectors[mine])
    assert_same(rest, Statistics.of(vectors[~mine], ids[~mine], projection))


@settings(deadline=None, max_examples=30)
@given(tasks_strategy, st.sampled_from(PROJECTIONS))
def test_remove_undoes_add(drawn: Any, projection: Projection) -> None:
    *before, last = [make_task(*each) for each in drawn]
    statistics = gather(before, projection)
    statistics.add(*last)
    statistics.remove(*last)
    assert_same(statistics, gather(before, projection))


@settings(deadline=None, max_examples=20)
@given(tasks_strategy, st.sampled_from(PROJECTIONS))
def test_merging_equals_adding(drawn: Any, projection: Projection) -> None:
    first, *others = [make_task(*each) for each in drawn]
    merged = Statistics.of(*first, projection).merged(gather(others, projection))
    assert_same(merged, gather([first, *others], projection))


def test_plain_statistics_are_those_without_the_projection() -> None:
    task = make_task(0, [0, 4], 5)
    assert_same(Statistics.of(*task, PROJECTIONS[1]).plain(), Statistics.of(*task, PROJECTIONS[0]))


def test_arrays_restore_the_statistics_to_the_bit() -> None:
    statistics = gather([make_task(0, [0, 4], 5), make_task(1, [2], 3)], PROJECTIONS[1])
    restored = Statistics.from_arrays(statistics.to_arrays())
    assert_same(statistics, restored, tolerance=0)
    assert restored.projection == statistics.projection
    assert (restored.gram == restored.gram.T).all()


def test_many_images_are_added_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    task = make_task(0, [0, 1, 2], 9)
    whole = Statistics.of(*task, PROJECTIONS[1])
    monkeypatch.setattr(module, "CHUNK", 4)
    assert_same(whole, Statistics.of(*task, PROJECTIONS[1]))


def test_other_vectors_are_not_subtracted() -> None:
    vectors, ids = make_task(0, [0, 1], 5)
    statistics = Statistics.of(vectors, ids, PROJECTIONS[0])
    own, others = vectors[ids == 0], vectors[ids == 1]
    for wrong in (others, own[:-1], np.concatenate([own, own[:1]])):
        with pytest.raises(StatisticsError, match="not the 5 that were added for class 0"):
            statistics.without(0, wrong)
    with pytest.raises(StatisticsError, match="no class 3"):
        statistics.without(3, own)
    with pytest.raises(StatisticsError, match="at most 5"):
        statistics.remove(vectors, np.zeros(10, int))


@pytest.mark.parametrize(
    ("vectors", "ids", "message"),
    [
        (np.zeros((2, DIM + 1)), [0, 1], "allowed: \\[n, 24\\] and \\[n\\]"),
        (np.zeros((2, DIM)), [0], "allowed: \\[n, 24\\] and \\[n\\]"),
        (np.zeros((2, DIM)), [0, -1], "numbers from 0"),
        (np.full((2, DIM), np.nan), [0, 1], "NaN or infinity"),
    ],
)
def test_wrong_vectors_are_refused_and_change_nothing(vectors: NDArray[Any], ids: list[int], message: str) -> None:
    statistics = gather([make_task(0, [0], 3)], PROJECTIONS[0])
    before = statistics.copy()
    with pytest.raises(StatisticsError, match=message):
        statistics.add(vectors, ids)
    assert_same(statistics, before, tolerance=0)


def test_statistics_of_other_vectors_are_not_merged() -> None:
    with pytest.raises(StatisticsError, match="merge"):
        Statistics(PROJECTIONS[0]).merged(Statistics(PROJECTIONS[1]))


def test_incomplete_arrays_are_refused() -> None:
    arrays = gather([make_task(0, [0], 3)], PROJECTIONS[0]).to_arrays()
    with pytest.raises(StatisticsError, match="sums are missing"):
        Statistics.from_arrays({name: each for name, each in arrays.items() if name != "sums"})
    with pytest.raises(StatisticsError, match="gram has shape"):
        Statistics.from_arrays(arrays | {"gram": arrays["gram"][:-1]})
