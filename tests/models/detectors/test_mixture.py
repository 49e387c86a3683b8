"""Class mixtures against Gaussians that are computed one by one with full covariances."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from models.detectors import mixture as mixtures
from models.detectors.mixture import COMPONENTS, RANK, SHRINKAGE, DeepMixture
from models.detectors.score import Features
from tests.helpers import as_float

Array = NDArray[np.float64]


def slow_likelihoods(groups: list[Array], images: Array) -> Array:
    """[4, n, features] of each component's images and of others -> [4, n, components].

    2 / features times the negative log-density, without the constant that all Gaussians have in common.
    """
    turns, count = len(images), images.shape[2]
    found = np.empty((turns, images.shape[1], len(groups)))
    for turn in range(turns):
        new = images[turn] / np.linalg.norm(images[turn], axis=1, keepdims=True)
        for place, group in enumerate(groups):
            own = group[turn] / np.linalg.norm(group[turn], axis=1, keepdims=True)
            covariance = levelled(np.cov(own.T, bias=True).reshape(count, count))
            difference = new - own.mean(axis=0)
            squared = np.einsum("nf,fg,ng->n", difference, np.linalg.inv(covariance), difference)
            found[turn, :, place] = (squared + np.linalg.slogdet(covariance).logabsdet) / count
    return found


def levelled(covariance: Array) -> Array:
    """The covariance shrunk towards a sphere, with one variance for all but its largest axes."""
    count = len(covariance)
    sphere = np.trace(covariance) / count
    variance, axes = np.linalg.eigh(covariance)
    if count > RANK:
        variance[: count - RANK] = variance[: count - RANK].mean()
    shrunk = (1 - SHRINKAGE) * variance + SHRINKAGE * sphere
    if count <= RANK:
        # No axis is left to estimate the remaining variance, so that of the sphere is used as a lower bound.
        shrunk = np.maximum(shrunk, sphere)
    return np.asarray(axes * shrunk @ axes.T)


def clusters(count: int, per_cluster: int, centres: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[4, n, features] around centres far apart, and the centre of each; it is clear which axes vary most."""
    generator = torch.Generator().manual_seed(0)
    centre = torch.arange(centres).repeat_interleave(per_cluster)
    middles = 5 * torch.randn(centres, count, generator=generator)
    spread = torch.cat([torch.linspace(2, 1, RANK - 2), torch.full((count,), 0.02)])[:count]
    noise = torch.randn(4, len(centre), count, generator=generator) * spread
    return middles[centre] + noise, centre


def fitted(train: torch.Tensor, classes: torch.Tensor) -> DeepMixture:
    score = DeepMixture("deep", int(classes.max()) + 1)
    score.fit(Features(torch.zeros_like(train), train), classes, torch.zeros(len(classes), score.classes))
    return score


def likelihoods(score: DeepMixture, images: torch.Tensor) -> torch.Tensor:
    return score.measure(Features(torch.zeros_like(images), images))


def nearest(score: DeepMixture, means: torch.Tensor) -> torch.Tensor:
    return score.score({"deep": means})


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unrounded axes, to compare the rest more closely."""
    monkeypatch.setattr(mixtures, "rounded", lambda axes: (axes, torch.ones_like(axes[:, :1])))


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("count", [5, RANK, RANK + 9])
def test_one_gaussian_per_class(count: int) -> None:
    train, classes = clusters(count, 40, 3)
    images = torch.randn(4, 7, count)
    score = fitted(train, classes)
    assert score.components == 3
    wanted = slow_likelihoods([as_float(train[:, classes == c]) for c in range(3)], as_float(images))
    got = likelihoods(score, images)
    assert as_float(got) == pytest.approx(wanted, rel=1e-3, abs=1e-4)
    assert torch.equal(nearest(score, got[0]), got[0])


@pytest.mark.usefixtures("exact")
def test_several_gaussians_per_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two classes of three clusters each; the distance of a class is that of its nearest cluster."""
    monkeypatch.setattr(mixtures, "ENOUGH_IMAGES", 40)
    train, centre = clusters(RANK + 9, 40, 6)
    score = fitted(train, centre // 3)
    assert score.components == 6
    images = torch.randn(4, 7, RANK + 9)
    slow = slow_likelihoods([as_float(train[:, centre == c]) for c in range(6)], as_float(images))
    got = likelihoods(score, images)
    # The order of clusters does not matter, but it is the same in all rotations.
    for own in (slice(0, 3), slice(3, 6)):
        order = [np.abs(slow[0, :, own] - as_float(column)[:, None]).sum(axis=0).argmin() for column in got[0].T[own]]
        assert sorted(order) == [0, 1, 2]
        assert as_float(got[:, :, own]) == pytest.approx(slow[:, :, own][:, :, order], rel=1e-3, abs=1e-4)
    wanted = slow.mean(axis=0).reshape(7, 2, 3).min(axis=2)
    assert as_float(nearest(score, got.mean(dim=0))) == pytest.approx(wanted, rel=1e-3, abs=1e-4)


def test_axes_of_8_bits_give_nearly_the_same_likelihoods() -> None:
    train, classes = clusters(64, 40, 3)
    images, _ = clusters(64, 10, 3)
    score = fitted(train, classes)
    assert score.axes.dtype == torch.int8
    wanted = slow_likelihoods([as_float(train[:, classes == c]) for c in range(3)], as_float(images))
    assert as_float(likelihoods(score, images)) == pytest.approx(wanted, rel=0.05, abs=0.02)


@pytest.mark.parametrize(("images", "components"), [(30, 1), (99, 1), (100, 2), (220, COMPONENTS)])
def test_the_number_of_components_follows_from_that_of_images(
    images: int, components: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mixtures, "ENOUGH_IMAGES", 50)
    # The smaller class determines the number for both.
    classes = torch.tensor([0] * images + [1] * 300)
    score = fitted(torch.randn(4, len(classes), 24), classes)
    assert score.components == 2 * components


def test_an_image_is_likeliest_under_its_own_class() -> None:
    train, classes = clusters(12, 30, 3)
    score = fitted(train, classes)
    assert torch.equal(nearest(score, likelihoods(score, train).mean(dim=0)).argmin(dim=1), classes)


@pytest.mark.parametrize("features", [torch.ones(4, 4, 1), torch.zeros(4, 4, 3), torch.ones(4, 4, 3)])
def test_features_without_information_still_give_finite_likelihoods(features: torch.Tensor) -> None:
    score = fitted(features, torch.tensor([0, 1, 0, 1]))
    assert likelihoods(score, features).isfinite().all()
