from __future__ import annotations

import numpy as np
import pytest
import torch

from models.detectors import mahalanobis
from models.detectors.mahalanobis import RANK, SHRINKAGE, Mahalanobis
from models.detectors.score import Features
from tests.helpers import as_float


def slow_distances(train: np.ndarray, classes: np.ndarray, images: np.ndarray) -> np.ndarray:
    """The definition, written out: one tied covariance per rotation with the variance of its smaller axes levelled, per
    live feature, mean over rotations."""
    count, total = train.shape[2], 0.0
    for known, new in zip(train, images, strict=True):
        known = known / np.linalg.norm(known, axis=1, keepdims=True)
        new = new / np.linalg.norm(new, axis=1, keepdims=True)
        means = np.stack([known[classes == c].mean(axis=0) for c in range(classes.max() + 1)])
        covariance = np.cov((known - means[classes]).T, bias=True)
        covariance = (1 - SHRINKAGE) * covariance + SHRINKAGE * np.trace(covariance) / count * np.eye(count)
        variance, axes = np.linalg.eigh(covariance)
        variance[: max(0, count - RANK)] = variance[: max(0, count - RANK)].mean() if count > RANK else 0
        covariance = axes * variance @ axes.T
        difference = new[:, None] - means
        total = total + np.einsum("ncf,fg,ncg->nc", difference, np.linalg.inv(covariance), difference) / count
    return np.asarray(total / len(train))


def fitted(train: torch.Tensor, classes: torch.Tensor) -> Mahalanobis:
    score = Mahalanobis("mahalanobis", int(classes.max()) + 1)
    score.fit(Features(train, train), classes, torch.zeros(len(classes), score.classes))
    return score


def distances(score: Mahalanobis, images: torch.Tensor) -> torch.Tensor:
    return score.measure(Features(images, images)).mean(dim=0)


@pytest.mark.parametrize(("is_rounded", "allowed"), [(False, 1e-4), (True, 0.03)])
@pytest.mark.parametrize("count", [6, RANK, RANK + 9])
def test_distances_follow_the_definition(
    count: int, is_rounded: bool, allowed: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exactly with axes that are not rounded to 8 bits, and closely with rounded ones."""
    if not is_rounded:
        monkeypatch.setattr(mahalanobis, "rounded", lambda axes: (axes, torch.ones_like(axes[:, :1])))
    torch.manual_seed(0)
    classes = torch.tensor([0, 1, 2] * 5)
    train, images = torch.randn(4, 15, count) + classes[None, :, None], torch.randn(4, 7, count)
    wanted = slow_distances(as_float(train), classes.numpy(), as_float(images))
    assert as_float(distances(fitted(train, classes), images)) == pytest.approx(wanted, rel=allowed)


def test_an_image_of_a_class_is_nearest_to_that_class() -> None:
    torch.manual_seed(0)
    classes = torch.arange(3).repeat(10)
    directions = torch.eye(3)[classes]
    score = fitted((directions + 0.1 * torch.randn(4, 30, 3)).clamp(min=0), classes)
    assert distances(score, directions.expand(4, -1, -1)).argmin(dim=1).tolist() == classes.tolist()


@pytest.mark.parametrize("features", [torch.ones(4, 4, 1), torch.zeros(4, 4, 3), torch.ones(4, 4, 3)])
def test_features_without_information_still_give_finite_distances(features: torch.Tensor) -> None:
    assert distances(fitted(features, torch.tensor([0, 1, 0, 1])), features).isfinite().all()
