"""Learning tasks one after another from made-up vectors, as training and servers do."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, permutations

import numpy as np
import pytest
from numpy.typing import NDArray

from serving.bundle.decision import Rule, judge
from serving.bundle.pooled import (
    ChoiceMemory,
    LearnedTask,
    PooledClassifier,
    PooledSettings,
    Projection,
    Statistics,
    learn_task,
)
from serving.bundle.pooled.classifier_choice import GRID, MIXES, RIDGES, SHRINKAGES, chosen_classifier
from serving.bundle.pooled.left_out import MOST, LeftOut, LeftOutDiscriminant, LeftOutRidge
from serving.bundle.pooled.settings import UnknownScore
from serving.bundle.pooled.solution import Solution, Within
from serving.bundle.pooled.unknown_choice import CANDIDATES, chosen_unknown, separations
from serving.bundle.pooled_model import PooledModel

DIM = 24
Vectors = NDArray[np.float64]
Task = tuple[Vectors, NDArray[np.int64]]


def make_task(classes: Sequence[int], images: int, seed: int, noise: float = 0.5) -> Task:
    """Unit vectors around one random direction per class."""
    rng = np.random.default_rng(seed)
    ids = np.repeat(classes, images)
    centers = np.stack([np.random.default_rng(1000 + each).normal(size=DIM) for each in ids])
    return unit(centers + noise * rng.normal(size=centers.shape)), ids.astype(np.int64)


def unit(rows: Vectors) -> Vectors:
    scaled: Vectors = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return scaled


def learn(tasks: Sequence[Task], projection: Projection | None = None) -> list[LearnedTask]:
    """The tasks one after another."""
    statistics, memory, learned = Statistics(projection or Projection(DIM, 0)), ChoiceMemory(), []
    for number, task in enumerate(tasks):
        earlier = [each.task for each in learned]
        learned.append(learn_task(statistics, memory, *task, seed=number, earlier=earlier))
        statistics, memory = learned[-1].statistics, learned[-1].memory
    return learned


def model_of(learned: Sequence[LearnedTask]) -> tuple[PooledModel, Rule]:
    rule = Rule(score="pooled", alpha=0.05, tasks=tuple(each.rule for each in learned), joint=True, expectation=True)
    return PooledModel(learned[-1].classifier, tuple(each.detector for each in learned)), rule


THREE = [make_task([0, 1, 2], 40, 1), make_task([3, 4], 40, 2), make_task([5, 6, 7], 40, 3)]


def test_tasks_are_learned_and_unknown_images_rejected() -> None:
    model, rule = model_of(learn(THREE))
    known, ids = make_task(range(8), 50, 9)
    unknown, _ = make_task(range(8, 14), 50, 9)
    on_known, on_unknown = (judge(model.outputs(each), rule) for each in (known, unknown))
    assert (on_known.class_id == ids).mean() > 0.95
    assert on_known.known.mean() > 0.9
    assert on_unknown.known.mean() < 0.3


def test_a_later_task_changes_no_detector_and_no_argument() -> None:
    first = learn(THREE[:1])[0]
    gram, nats = first.statistics.gram.copy(), first.memory.cross_entropies.copy()
    images = make_task(range(8), 3, 9)[0]
    distances = first.detector.distances(images)
    second = learn_task(first.statistics, first.memory, *THREE[1], seed=1)
    assert (first.statistics.gram == gram).all()
    assert (first.memory.cross_entropies == nats).all()
    assert (first.detector.distances(images) == distances).all()
    assert second.classifier.class_ids.tolist() == [0, 1, 2, 3, 4]
    assert second.detector.class_ids.tolist() == [3, 4]
    assert second.rule.images == 80


def test_the_same_arguments_give_the_same_result() -> None:
    one, other = learn(THREE)[-1], learn(THREE)[-1]
    for first, second in (
        (one.classifier, other.classifier),
        (one.detector, other.detector),
        (one.memory, other.memory),
    ):
        for name, values in first.to_arrays().items():
            assert (values == second.to_arrays()[name]).all(), name
    assert one.rule == other.rule


def test_with_the_same_settings_the_order_of_tasks_makes_no_difference() -> None:
    images = make_task(range(8), 5, 9)[0]
    settings = learn(THREE)[-1].classifier.settings
    logits = []
    for order in permutations(THREE):
        statistics = learn(order)[-1].statistics
        logits.append(PooledClassifier.fit(statistics, settings).logits(images))
    for other in logits[1:]:
        np.testing.assert_allclose(other, logits[0], atol=1e-6 * np.abs(logits[0]).max())


def test_memory_adds_up_and_survives_a_file() -> None:
    learned = learn(THREE)
    for before, after in pairwise(learned):
        assert (after.memory.cross_entropies >= before.memory.cross_entropies).all()
        assert (after.memory.separations >= before.memory.separations).all()
    memory = learned[-1].memory
    restored = ChoiceMemory.from_arrays(memory.to_arrays())
    assert (restored.cross_entropies == memory.cross_entropies).all()
    assert (restored.separations == memory.separations).all()
    with pytest.raises(ValueError, match="separations has shape"):
        ChoiceMemory.from_arrays({**memory.to_arrays(), "separations": np.zeros(1)})


def test_the_classifier_is_chosen_by_the_sum_over_tasks() -> None:
    nats = np.ones(GRID)
    nats[2, 1, 3, 4] = 0.5
    chosen = chosen_classifier(nats)
    assert (chosen.shrinkage, chosen.mix) == (SHRINKAGES[2], MIXES[3])
    assert (chosen.expanded, chosen.ridge) == RIDGES[1]
    assert chosen_classifier(np.zeros(GRID)) == PooledSettings(), "nothing was measured"


def test_classes_that_no_line_separates_are_learned_by_the_expansion() -> None:
    """Each class lies on both sides of the origin, so all class means are equal, and LDA can only guess."""

    def task(seed: int) -> Task:
        vectors, ids = make_task([0, 1], 200, seed, noise=0.3)
        return vectors * np.random.default_rng(seed).choice([-1.0, 1.0], size=(len(ids), 1)), ids

    learned = learn([task(1)], Projection(DIM, 64))[0]
    vectors, ids = task(2)
    assert learned.classifier.settings.expanded
    assert (learned.classifier.logits(vectors).argmax(axis=1) == ids).mean() > 0.9
    plain = learn([task(1)], Projection(DIM, 0))[0]
    assert (plain.classifier.logits(vectors).argmax(axis=1) == ids).mean() < 0.7


def test_the_probabilities_are_calibrated() -> None:
    """Classes that overlap: the mean probability of the answer is about the share of right answers."""
    model, rule = model_of(learn([make_task(range(6), 60, 1, noise=2.0)]))
    vectors, ids = make_task(range(6), 300, 2, noise=2.0)
    verdicts = judge(model.outputs(vectors), rule)
    right = (verdicts.class_id == ids).mean()
    assert 0.4 < right < 0.95
    assert verdicts.probability.max(axis=1).mean() == pytest.approx(right, abs=0.06)


def left_out(statistics: Statistics, task: Task) -> tuple[LeftOut, LeftOutDiscriminant, LeftOutRidge]:
    images = LeftOut.of(statistics, *task, seed=0)
    return images, LeftOutDiscriminant(images, 0.35), LeftOutRidge(images, 0.03, expanded=True)


def test_the_unknown_score_is_the_one_that_separates_left_out_classes() -> None:
    areas, squares, groups = separations(*left_out(learn(THREE)[-1].statistics, THREE[2]))
    assert areas.shape == (len(CANDIDATES),)
    assert (groups == 3).all(), "three classes are left out in turn"
    assert (areas > 0.8 * 3).all(), "every score separates them"
    assert (areas <= 3).all()
    assert squares[0] == 0
    assert ((areas - areas[0]) ** 2 / 3 <= squares + 1e-12).all()


def measured(areas: NDArray[np.float64]) -> NDArray[np.float64]:
    """What is kept of areas [groups, candidates]."""
    return np.stack(
        [areas.sum(axis=0), ((areas - areas[:, :1]) ** 2).sum(axis=0), np.full(len(CANDIDATES), len(areas))]
    )


def test_another_score_than_the_sum_is_chosen_only_if_it_is_clearly_better() -> None:
    rng = np.random.default_rng(0)
    areas = np.full((10, len(CANDIDATES)), 0.9)
    areas[:, 2] += 0.03 + 0.01 * rng.normal(size=10)
    areas[:, 4] += np.resize([0.5, -0.4], 10)
    assert CANDIDATES[0] == ("relative", "lda", "ridge")
    assert chosen_unknown(measured(areas)) == CANDIDATES[2]
    assert chosen_unknown(measured(areas[:4])) == CANDIDATES[0], "four groups are too few"
    areas[:, 2] = 0.9 + np.resize([0.05, -0.04], 10)
    assert chosen_unknown(measured(areas)) == CANDIDATES[0], "what is left is noise"
    assert chosen_unknown(measured(np.full((10, len(CANDIDATES)), 0.9))) == CANDIDATES[0]
    assert chosen_unknown(ChoiceMemory().separations) == CANDIDATES[0], "nothing was measured"


def test_left_out_outputs_are_those_of_statistics_without_the_images() -> None:
    """A fold, and a class as a whole; nothing but the diagonal and the penalty stay those of all images."""
    statistics = learn(THREE, Projection(DIM, 16))[-1].statistics
    images, lda, ridge = left_out(statistics, THREE[2])
    for rows in (np.flatnonzero(images.fold == 1), np.flatnonzero((images.fold == 2) | (images.class_ids == 6))):
        rest = statistics.copy()
        rest.remove(images.encoded[rows], images.class_ids[rows])
        solved = Solution.of(rest, PooledSettings(shrinkage=0.35, ridge=0.03, expanded=True))
        found = lda.without(rows)
        assert statistics.class_ids[found.kept].tolist() == rest.class_ids.tolist()
        pairs = {
            name: (found.distances(name), solved.distances(name, images.encoded[rows])) for name in ("lda", "relative")
        }
        pairs["ridge"] = -ridge.without(rows)[:, found.kept], solved.distances("ridge", images.encoded[rows])
        for name, (fast, slow) in pairs.items():
            assert np.abs(fast - slow).max() < 0.05 * np.abs(slow).max(), name
    full = Solution.of(statistics, PooledSettings(shrinkage=0.35, ridge=0.03, expanded=True))
    assert lda.margin == pytest.approx(full.lda.margin, rel=0.05)
    assert ridge.margin == pytest.approx(full.ridge.margin)


@pytest.mark.parametrize("name", ["lda", "relative"])
def test_left_out_distances_are_the_formulas(name: UnknownScore) -> None:
    """Computed from the vectors themselves, by a covariance from which the left-out images were subtracted."""
    statistics = learn(THREE)[-1].statistics
    images, discriminant, _ = left_out(statistics, THREE[2])
    rows = np.flatnonzero((images.fold == 2) | (images.class_ids == 6))
    rest = statistics.copy()
    rest.remove(images.encoded[rows], images.class_ids[rows])
    lost = images.within.scatter - Within.of(rest).scatter
    shrunk = images.within.shrunk(0.35, discriminant.freedom) - 0.65 * lost / discriminant.freedom
    within = shrunk * discriminant.freedom / (rest.images - len(rest.class_ids))
    inverse, means, center = np.linalg.inv(within), rest.means, rest.sums.sum(axis=0) / rest.images
    apart = images.encoded[rows][:, None] - means
    squared = np.einsum("nci,ij,ncj->nc", apart, inverse, apart)
    if name == "lda":
        vectors = images.encoded[rows]
        expected = (squared - np.einsum("ni,ij,nj->n", vectors, inverse, vectors)[:, None]) / 2
    else:
        between = (means - center).T @ np.diag(rest.counts / rest.images) @ (means - center)
        centred = images.encoded[rows] - center
        total = np.einsum("ni,ij,nj->n", centred, np.linalg.inv(within + between), centred)
        expected = squared - total[:, None]
    np.testing.assert_allclose(discriminant.without(rows).distances(name), expected, rtol=1e-8, atol=1e-8)


def test_every_image_is_left_out_once_and_no_class_disappears() -> None:
    vectors, ids = make_task([4, 7], 11, 0)
    ids[-1] = 9
    images = LeftOut.of(Statistics.of(vectors, ids, Projection(DIM, 0)), vectors, ids, seed=3)
    assert len(images) == 21, "the only image of class 9 stays"
    assert sorted(np.concatenate(list(images.folds())).tolist()) == list(range(21))
    assert {4, 7} == set(images.class_ids.tolist())
    for rows in images.folds():
        assert (np.unique(images.class_ids[rows], return_counts=True)[1] <= 3).all()
    many = LeftOut.of(
        *(lambda task: (Statistics.of(*task, Projection(DIM, 0)), *task))(make_task([0, 1], 900, 1)), seed=0
    )
    assert np.bincount(many.class_ids).tolist() == [MOST // 2, MOST // 2]


@pytest.mark.parametrize(("classes", "images"), [(1, 1), (1, 30), (2, 1), (2, 2)])
def test_few_images_and_single_classes_are_learned(classes: int, images: int) -> None:
    learned = learn([make_task(range(classes), images, 1), make_task([classes], images, 2)])
    model, rule = model_of(learned)
    verdicts = judge(model.outputs(make_task(range(classes + 1), 4, 3)[0]), rule)
    assert np.isfinite(verdicts.probability).all()
    assert np.isfinite(verdicts.unknown_score).all()


def test_each_image_without_itself() -> None:
    """Leaving every image out by itself, in one go, is what leaving out each one is; a class of one has no output."""
    statistics, task = learn(THREE, Projection(DIM, 16))[-1].statistics, THREE[2]
    single = np.random.default_rng(9).standard_normal((1, task[0].shape[1]))
    alone = int(statistics.class_ids.max()) + 1
    statistics.add(single, [alone])
    encoded, ids = np.concatenate([task[0], single]), np.concatenate([task[1], [alone]])
    images = LeftOut(statistics, encoded.astype(np.float64), ids, np.arange(len(ids)))
    discriminant = LeftOutDiscriminant(images, 0.35, alone=True)
    ridge = LeftOutRidge(images, 0.03, expanded=True)
    lda, linear = discriminant.each_without_itself(), ridge.each_without_itself()
    for row in range(len(ids)):
        one = discriminant.without(np.array([row]))
        np.testing.assert_allclose(lda[row, one.kept], one.outputs[0], atol=1e-9)
        assert np.isneginf(lda[row, ~one.kept]).all()
        np.testing.assert_allclose(linear[row], ridge.without(np.array([row]))[0], atol=1e-9)
    assert np.isneginf(lda[-1]).sum() == 1
