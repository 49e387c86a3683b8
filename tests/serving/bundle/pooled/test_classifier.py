"""The pooled classifier on made-up vectors."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from serving.bundle.pooled import (
    PooledClassifier,
    PooledSettings,
    Projection,
    Standardised,
    Statistics,
    StatisticsError,
)
from serving.bundle.pooled.settings import UNKNOWN_SCORES
from serving.bundle.pooled.solution import discriminant

DIM = 40
PROJECTION = Projection(DIM, 64)
EVERY_SCORE = PooledSettings(
    mix=0.4,
    lda_scale=3.0,
    ridge_scale=0.2,
    temperature=0.7,
    unknown=tuple(Standardised(name=name, center=0.1, scale=2.0) for name in UNKNOWN_SCORES),
    rank=DIM,
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
    return float((classifier.class_ids[classifier.outputs(vectors)["logits"].argmax(axis=1)] == ids).mean())


@pytest.mark.parametrize("mix", [0.0, 0.5, 1.0])
def test_classes_are_told_apart(mix: float) -> None:
    settings = EVERY_SCORE.model_copy(update={"mix": mix})
    classifier = PooledClassifier.fit(Statistics.of(*make_images(0, 8, 30), PROJECTION), settings)
    assert accuracy(classifier, *make_images(1, 8, 20)) > 0.9


def test_logits_and_distances_are_the_formulas() -> None:
    """Compared with the textbook expressions, computed from the vectors themselves."""
    vectors, ids = make_images(0, 4, 25)
    classifier = PooledClassifier.fit(Statistics.of(vectors, ids, PROJECTION), EVERY_SCORE)
    image = make_images(1, 4, 1)[0][2]
    means = np.stack([vectors[ids == each].mean(axis=0) for each in range(4)])
    center = vectors.mean(axis=0)

    def shrink(rows: NDArray[np.float64], freedom: int) -> NDArray[np.float64]:
        covariance = rows.T @ rows / freedom
        return (1 - 0.35) * covariance + 0.35 * np.diag(np.diag(covariance))

    within = np.linalg.inv(shrink(vectors - means[ids], 96))
    total = np.linalg.inv(shrink(vectors - center, 99))
    squared = np.array([(image - mean) @ within @ (image - mean) for mean in means])
    around = (image - center) @ within @ (image - center)
    lda = -(squared - around) / 2
    phi, target = PROJECTION.expand(vectors), np.eye(4)[ids]
    penalty = 0.01 * (phi**2).sum(axis=1).mean()
    ridge = PROJECTION.expand(image[None]) @ np.linalg.solve(
        phi.T @ phi + penalty * np.eye(phi.shape[1]), phi.T @ target
    )
    relative = squared - (image - center) @ total @ (image - center)
    distances = sum((each - 0.1) / 2.0 for each in (relative, squared, -lda, -ridge[0]))
    mixed = 0.6 * (lda - lda.mean()) / 3.0 + 0.4 * (ridge[0] - ridge.mean()) / 0.2
    outputs = classifier.outputs(image[None])
    np.testing.assert_allclose(outputs["logits"][0], mixed / 0.7, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(outputs["distances"][0], distances, rtol=1e-4)


@pytest.mark.parametrize("projection", [Projection(DIM, 0), PROJECTION])
def test_an_answer_does_not_depend_on_its_batch(projection: Projection) -> None:
    classifier = PooledClassifier.fit(Statistics.of(*make_images(0, 5, 20), projection), EVERY_SCORE)
    images = make_images(1, 7, 3)[0].astype(np.float32)
    whole = classifier.outputs(images)
    for size in (1, 7):
        for start in range(0, len(images), size):
            part = classifier.outputs(images[start : start + size])
            for name, values in part.items():
                assert (values == whole[name][start : start + size]).all()


def test_arrays_restore_the_answers_to_the_bit() -> None:
    classifier = PooledClassifier.fit(Statistics.of(*make_images(0, 5, 20), PROJECTION), EVERY_SCORE)
    restored = PooledClassifier.from_arrays(classifier.to_arrays())
    images = make_images(1, 5, 2)[0]
    for name, values in classifier.outputs(images).items():
        assert (restored.outputs(images)[name] == values).all()
    assert restored.settings == classifier.settings


@pytest.mark.parametrize("score", UNKNOWN_SCORES)
def test_unknown_images_are_farther_away(score: str) -> None:
    settings = PooledSettings.model_validate({"unknown": [{"name": score}], "rank": 8})
    classifier = PooledClassifier.fit(Statistics.of(*make_images(0, 6, 40), PROJECTION), settings)
    vectors, ids = make_images(1, 12, 20)
    scores = classifier.outputs(vectors)["distances"].min(axis=1)
    known, unknown = scores[ids < 6], scores[ids >= 6]
    assert (known[:, None] < unknown[None, :]).mean() > 0.85


@pytest.mark.parametrize(("classes", "images"), [(1, 1), (1, 5), (2, 1), (3, 2)])
def test_few_images_and_single_classes_work(classes: int, images: int) -> None:
    classifier = PooledClassifier.fit(Statistics.of(*make_images(0, classes, images), PROJECTION), EVERY_SCORE)
    outputs = classifier.outputs(make_images(1, 3, 2)[0])
    assert outputs["logits"].shape == outputs["distances"].shape == (6, classes)
    assert all(np.isfinite(values).all() for values in outputs.values())


def test_a_constant_number_does_no_harm() -> None:
    vectors, ids = make_images(0, 4, 20)
    vectors[:, 3] = 0.25
    classifier = PooledClassifier.fit(Statistics.of(vectors, ids, PROJECTION), EVERY_SCORE)
    assert accuracy(classifier, vectors, ids) > 0.9


def test_forms_keep_what_is_far_from_the_rest() -> None:
    """A few directions and a diagonal come close to the exact distances, and all directions reach them."""
    vectors, ids = make_images(0, 8, 40)
    statistics = Statistics.of(vectors, ids, PROJECTION)
    exact = discriminant(statistics, 0.35)
    images = make_images(1, 8, 5)[0]
    centred = images - exact.center
    expected = ((centred @ np.linalg.inv(exact.within)) * centred).sum(axis=1)[:, None] - 2 * exact.outputs(images)
    errors = []
    for rank in (0, 10, DIM):
        settings = PooledSettings(unknown=(Standardised(name="mahalanobis"),), rank=rank)
        found = PooledClassifier.fit(statistics, settings).outputs(images)["distances"]
        errors.append(float(np.abs(found - expected).max() / np.abs(expected).mean()))
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 1e-4


def test_no_images_are_refused() -> None:
    with pytest.raises(StatisticsError, match="0 images"):
        PooledClassifier.fit(Statistics(PROJECTION), EVERY_SCORE)


def test_vectors_of_another_length_are_refused() -> None:
    classifier = PooledClassifier.fit(Statistics.of(*make_images(0, 2, 5), PROJECTION), EVERY_SCORE)
    with pytest.raises(ValueError, match="allowed: \\[n, 40\\]"):
        classifier.outputs(np.zeros((1, DIM + 1)))


def test_a_score_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="each score once"):
        PooledSettings(unknown=(Standardised(name="lda"), Standardised(name="lda")))
