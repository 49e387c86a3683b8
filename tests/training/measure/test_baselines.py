"""Baselines against slow definitions of them."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import multivariate_normal

from training.data.images import Images
from training.measure import baselines
from training.measure.baselines import SHRINKAGE, TaskRows, from_gaussians, from_mean, rows_of


def drawn(count: int, seed: int, numbers: int = 5) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return (generator.normal(size=(count, numbers)) @ generator.normal(size=(numbers, numbers))).astype(np.float32)


def test_the_distance_from_a_gaussian_is_twice_the_negative_log_likelihood() -> None:
    own, rows = drawn(60, 0), drawn(7, 1)
    covariance = np.cov(own.T, bias=True)
    covariance = (1 - SHRINKAGE) * covariance + SHRINKAGE * np.trace(covariance) / 5 * np.eye(5)
    wanted = -2 * multivariate_normal(own.mean(axis=0), covariance).logpdf(rows) - 5 * np.log(2 * np.pi)
    assert from_gaussians(own, rows) == pytest.approx(wanted, rel=1e-3)


def test_with_fewer_images_than_numbers_the_distance_is_the_same_and_takes_no_large_matrix() -> None:
    own, rows = drawn(12, 0, 40), drawn(7, 1, 40)
    covariance = np.cov(own.T, bias=True)
    covariance = (1 - SHRINKAGE) * covariance + SHRINKAGE * np.trace(covariance) / 40 * np.eye(40)
    wanted = -2 * multivariate_normal(own.mean(axis=0), covariance).logpdf(rows) - 40 * np.log(2 * np.pi)
    assert from_gaussians(own, rows) == pytest.approx(wanted, rel=1e-3)
    # The covariance matrix would have 10 GB.
    long = np.random.default_rng(0).normal(size=(6, 36_000)).astype(np.float32)
    assert from_gaussians(long[:4], long).argmax() >= 4


def test_baselines_of_encoded_vectors_are_named_for_these() -> None:
    names = [each.title(encoded=True) for each in baselines.BASELINES]
    assert "Gaussians on encoded vectors" in names
    assert not [name for name in names if "pixel" in name]
    assert [each.title(encoded=False) for each in baselines.BASELINES] == [each.name for each in baselines.BASELINES]


def test_a_class_with_many_images_has_several_gaussians(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "ENOUGH_IMAGES", 30)
    own = np.concatenate([drawn(30, 0) * 0.1 - 10, drawn(30, 0) * 0.1 + 10])
    between, on_a_mean = from_gaussians(own, np.stack([np.zeros(5), np.full(5, 10)]).astype(np.float32))
    assert between > on_a_mean + 100


def test_the_distance_from_a_mean_is_squared() -> None:
    assert from_mean(np.array([[0.0, 0], [2, 0]]), np.array([[1.0, 3]])).tolist() == [9]


def test_large_images_are_averaged_and_encoded_ones_are_not() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (2, 65, 64, 3), dtype=np.uint8)
    rows = rows_of(Images(pixels, np.array(["a", "b"])), 1024)
    assert rows.shape == (2, 16 * 16 * 3)
    assert rows[0, :3] == pytest.approx(pixels[0, :4, :4].mean(axis=(0, 1)) / 255)
    vectors = np.random.default_rng(0).normal(size=(3, 2000)).astype(np.float32)
    encoded = Images(vectors, np.array(["a", "b"]), rows=np.array([2, 0]), originals=np.array([None, None]))
    assert np.array_equal(rows_of(encoded, 1024), vectors[[2, 0]])


def test_own_scores_are_of_images_that_nothing_was_fitted_to() -> None:
    """With few validation images, left-out training images are scored too, each by the other folds."""
    classes = np.repeat([0, 1], 20)
    task = TaskRows(drawn(40, 0) + 9 * classes[:, None], classes, drawn(4, 1), 2)
    rule = task.rule(from_mean, seed=0)
    assert rule.images == 44
    fitted = task.distances(from_mean, task.train).min(axis=1)
    left_out = np.setdiff1d(rule.own_scores, task.distances(from_mean, task.validation).min(axis=1))
    assert not np.isin(left_out, fitted).any()
    single = task._replace(train=task.train[19:], train_classes=classes[19:])
    assert single.rule(from_mean, seed=0).images == 4 + 20, "the only image of a class is not scored"
    many = task._replace(validation=drawn(300, 2))
    assert many.rule(from_mean, seed=0).images == 300
