"""The pooled classifier on made-up vectors."""

from __future__ import annotations

import numpy as np
import pytest
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
from serving.bundle.pooled.float16_rows import restored, rounded, stored
from serving.bundle.pooled.settings import UNKNOWN_SCORES
from serving.bundle.pooled.solution import Solution

DIM = 40
PROJECTION = Projection(DIM, 64)
SETTINGS = PooledSettings(
    shrinkage=0.35,
    ridge=0.01,
    expanded=True,
    mix=0.4,
    temperature=0.7,
    unknown=tuple(Standardised(name=name, center=0.1, scale=2.0) for name in UNKNOWN_SCORES),
)


def make_images(
    seed: int, classes: int, images: int, noise: float = 0.6
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Unit vectors around one direction per class; the noise is much larger in some directions than in others."""
    rng = np.random.default_rng(seed)
    centers = np.random.default_rng(99).normal(size=(12, DIM))
    ids = np.repeat(np.arange(classes), images)
    rows = centers[ids] + noise * rng.normal(size=(len(ids), DIM)) * np.linspace(0.2, 3, DIM)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True), ids


def accuracy(classifier: PooledClassifier, vectors: NDArray[np.float64], ids: NDArray[np.int64]) -> float:
    return float((classifier.class_ids[classifier.logits(vectors).argmax(axis=1)] == ids).mean())


def detector(statistics: Statistics, settings: PooledSettings = SETTINGS) -> Detector:
    """A detector of all classes of the statistics."""
    return Detector.of(Solution.of(statistics, settings), settings.unknown, statistics.class_ids)


@pytest.mark.parametrize("mix", [0.0, 0.5, 1.0])
def test_classes_are_told_apart(mix: float) -> None:
    settings = SETTINGS.model_copy(update={"mix": mix})
    classifier = PooledClassifier.fit(Statistics.of(*make_images(0, 8, 30), PROJECTION), settings)
    assert accuracy(classifier, *make_images(1, 8, 20)) > 0.9


def test_logits_and_distances_are_the_formulas() -> None:
    """Compared with the textbook expressions, computed from the vectors themselves."""
    vectors, ids = make_images(0, 4, 25)
    statistics = Statistics.of(vectors, ids, PROJECTION)
    image = make_images(1, 4, 1)[0][2]
    means = np.stack([vectors[ids == each].mean(axis=0) for each in range(4)])
    center = vectors.mean(axis=0)
    rows = vectors - means[ids]
    covariance = rows.T @ rows / 96
    within = (1 - 0.35) * covariance + 0.35 * np.diag(np.diag(covariance))
    between = (means - center).T @ (means - center) / 4

    def lda_of(vector: NDArray[np.float64]) -> NDArray[np.float64]:
        squares = np.array([(vector - mean) @ np.linalg.inv(within) @ (vector - mean) for mean in means])
        return -(squares - (vector - center) @ np.linalg.inv(within) @ (vector - center)) / 2

    phi, target = PROJECTION.expand(vectors), np.eye(4)[ids]
    penalty = 0.01 * (phi**2).sum(axis=1).mean()
    weights = np.linalg.solve(phi.T @ phi + penalty * np.eye(phi.shape[1]), phi.T @ target)

    def margin(outputs: NDArray[np.float64]) -> float:
        return float(np.mean([outputs[each, each] - np.delete(outputs[each], each).mean() for each in range(4)]))

    lda, ridge = lda_of(image), PROJECTION.expand(image[None])[0] @ weights
    lda_margin = margin(np.stack([lda_of(mean) for mean in means]))
    ridge_margin = margin(np.stack([phi[ids == each].mean(axis=0) for each in range(4)]) @ weights)
    mixed = 0.6 * (lda - lda.mean()) / lda_margin + 0.4 * (ridge - ridge.mean()) / ridge_margin
    logits = PooledClassifier.fit(statistics, SETTINGS).logits(image[None])[0]
    np.testing.assert_allclose(logits, mixed / 0.7, rtol=1e-4, atol=1e-4)

    squared = np.array([(image - mean) @ np.linalg.inv(within) @ (image - mean) for mean in means])
    relative = squared - (image - center) @ np.linalg.inv(within + between) @ (image - center)
    streaming = np.array([(image - mean / 2) @ np.linalg.inv(within) @ mean for mean in means])
    distances = sum((each - 0.1) / 2.0 for each in (relative, -streaming, -ridge))
    # The matrices of a detector are rounded.
    np.testing.assert_allclose(detector(statistics).distances(image[None])[0], distances, rtol=1e-3, atol=0.05)


@pytest.mark.parametrize("projection", [Projection(DIM, 0), PROJECTION])
def test_an_answer_does_not_depend_on_its_batch(projection: Projection) -> None:
    statistics = Statistics.of(*make_images(0, 5, 20), projection)
    images = make_images(1, 7, 3)[0].astype(np.float32)
    for answer in (PooledClassifier.fit(statistics, SETTINGS).logits, detector(statistics).distances):
        whole = answer(images)
        for size in (1, 7):
            for start in range(0, len(images), size):
                assert (answer(images[start : start + size]) == whole[start : start + size]).all()


def test_arrays_restore_the_answers_to_the_bit() -> None:
    statistics, images = Statistics.of(*make_images(0, 5, 20), PROJECTION), make_images(1, 5, 2)[0]
    classifier, own = PooledClassifier.fit(statistics, SETTINGS), detector(statistics)
    restored = PooledClassifier.from_arrays(classifier.to_arrays())
    assert (restored.logits(images) == classifier.logits(images)).all()
    assert restored.settings == classifier.settings
    assert (Detector.from_arrays(own.to_arrays()).distances(images) == own.distances(images)).all()


def test_a_detector_is_stored_in_16_bits_and_its_distances_hardly_change() -> None:
    """Beside many classes, which all have a row in a detector of the relative score."""
    rng = np.random.default_rng(0)
    ids = np.repeat(np.arange(100), 4)
    statistics = Statistics.of(rng.normal(size=(100, DIM))[ids] + 0.2 * rng.normal(size=(400, DIM)), ids, PROJECTION)
    solution = Solution.of(statistics, SETTINGS)
    own = Detector.of(solution, SETTINGS.unknown, np.arange(90, 100))
    matrices = {name: values for name, values in own.to_arrays().items() if values.ndim == 2}
    assert {name: values.dtype for name, values in matrices.items()} == {"rows": np.float16, "weights": np.float16}
    assert matrices["rows"].shape == (100, DIM)
    images = rng.normal(size=(50, DIM))
    exact = sum((solution.distances(each.name, images)[:, 90:] - each.center) / each.scale for each in SETTINGS.unknown)
    assert np.abs(own.distances(images) - exact).max() < 0.002 * np.std(exact)


@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 1e9])
def test_rounded_rows_are_restored_to_the_bit(size: float) -> None:
    """Rows of any size, and numbers that are rounded up to a power of two, or are one."""
    rng = np.random.default_rng(0)
    matrix = size * rng.normal(size=(30, 50)) * np.geomspace(1e-6, 1.0, 50)
    matrix[0], matrix[1, 0], matrix[2, 0] = 0.0, size * 2**20 * (1 - 1e-6), size * 2**20
    once = rounded(matrix)
    assert once.dtype == np.float32
    assert (rounded(once) == once).all()
    assert (restored("m", stored("m", once)) == once).all()
    largest = np.abs(matrix).max(axis=1, keepdims=True)
    assert (np.abs(once - matrix) <= np.maximum(np.abs(matrix) / 2**11, largest / 2**24)).all()
    assert rounded(np.zeros((0, 5))).shape == (0, 5)


def test_a_matrix_without_a_power_for_each_row_is_refused() -> None:
    arrays = stored("m", np.ones((3, 2), np.float32))
    with pytest.raises(ValueError, match="one power per row"):
        restored("m", arrays | {"m.powers": np.zeros(2, np.int16)})


def test_a_detector_of_some_classes_has_their_distances() -> None:
    statistics, images = Statistics.of(*make_images(0, 6, 20), PROJECTION), make_images(1, 6, 2)[0]
    own = Detector.of(Solution.of(statistics, SETTINGS), SETTINGS.unknown, np.array([3, 4]))
    np.testing.assert_allclose(own.distances(images), detector(statistics).distances(images)[:, 3:5], rtol=1e-3)


@pytest.mark.parametrize("score", UNKNOWN_SCORES)
def test_unknown_images_are_farther_away(score: str) -> None:
    settings = PooledSettings.model_validate({"unknown": [{"name": score}]})
    statistics = Statistics.of(*make_images(0, 6, 40), PROJECTION)
    vectors, ids = make_images(1, 12, 20)
    scores = detector(statistics, settings).distances(vectors).min(axis=1)
    known, unknown = scores[ids < 6], scores[ids >= 6]
    assert (known[:, None] < unknown[None, :]).mean() > 0.85


@pytest.mark.parametrize(("classes", "images"), [(1, 1), (1, 5), (2, 1), (3, 2)])
def test_few_images_and_single_classes_work(classes: int, images: int) -> None:
    statistics = Statistics.of(*make_images(0, classes, images), PROJECTION)
    vectors = make_images(1, 3, 2)[0]
    for values in (PooledClassifier.fit(statistics, SETTINGS).logits(vectors), detector(statistics).distances(vectors)):
        assert values.shape == (6, classes)
        assert np.isfinite(values).all()


def test_a_constant_number_does_no_harm() -> None:
    vectors, ids = make_images(0, 4, 20)
    vectors[:, 3] = 0.25
    classifier = PooledClassifier.fit(Statistics.of(vectors, ids, PROJECTION), SETTINGS)
    assert accuracy(classifier, vectors, ids) > 0.9


def test_no_images_are_refused() -> None:
    with pytest.raises(StatisticsError, match="0 images"):
        PooledClassifier.fit(Statistics(PROJECTION), SETTINGS)


def test_vectors_of_another_length_are_refused() -> None:
    statistics = Statistics.of(*make_images(0, 2, 5), PROJECTION)
    for answer in (PooledClassifier.fit(statistics, SETTINGS).logits, detector(statistics).distances):
        with pytest.raises(ValueError, match="allowed: \\[n, 40\\]"):
            answer(np.zeros((1, DIM + 1)))


def test_a_score_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="each score once"):
        PooledSettings(unknown=(Standardised(name="lda"), Standardised(name="lda")))
