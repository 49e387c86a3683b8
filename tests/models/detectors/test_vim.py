"""ViM's residual against principal components computed by numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from models.detectors import vim
from models.detectors.score import Features
from models.detectors.vim import RESIDUAL_RANK, Vim
from tests.helpers import as_float


def slow_residuals(train: NDArray[np.float64], images: NDArray[np.float64]) -> NDArray[np.float64]:
    """[4, n, features] -> [4, n]: lengths of what the first principal components leave over."""
    found = []
    for known, new in zip(train, images, strict=True):
        mean = known.mean(axis=0)
        axes = np.linalg.svd(known - mean, full_matrices=False)[2][:RESIDUAL_RANK]
        outside = (new - mean) - (new - mean) @ axes.T @ axes
        found.append(np.linalg.norm(outside, axis=1))
    return np.stack(found)


def fitted(train: torch.Tensor, largest_logit: float) -> Vim:
    """Fit ViM to images of one class with this largest logit."""
    count = train.shape[1]
    score = Vim("vim", classes=1)
    score.fit(Features(train, train), torch.zeros(count, dtype=torch.int64), torch.full((count, 1), largest_logit))
    return score


def lengths(score: Vim, images: torch.Tensor) -> torch.Tensor:
    return score.measure(Features(images, images))


def test_the_residual_is_what_the_principal_directions_leave_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vim, "rounded", lambda axes: (axes, torch.ones_like(axes[:, :1])))
    torch.manual_seed(0)
    count = 2 * RESIDUAL_RANK
    # The first directions vary much and the others little, so that it is clear which are principal.
    spread = torch.cat([torch.full((RESIDUAL_RANK,), 5.0), torch.full((RESIDUAL_RANK,), 0.1)])
    train, images = torch.randn(4, 200, count) * spread + 1, torch.randn(4, 7, count)
    score = fitted(train, largest_logit=-6.0)
    own, wanted = slow_residuals(as_float(train), as_float(train)), slow_residuals(as_float(train), as_float(images))
    # Scaled to the mean absolute largest logit on the task's own images.
    gain = 6 / own.mean()
    assert float(score.gain) == pytest.approx(gain, rel=1e-3)
    assert as_float(lengths(score, images))[:, :, 0] == pytest.approx(wanted * gain, rel=1e-3)
    assert float(lengths(score, train).mean()) == pytest.approx(6, rel=1e-4)


@pytest.mark.parametrize("features", [torch.randn(4, 9, 5), torch.ones(4, 9, 5), torch.randn(4, 3, 60)])
def test_with_few_features_or_images_it_stays_finite(features: torch.Tensor) -> None:
    score = fitted(features, largest_logit=2.0)
    # Even with few dimensions, a residual remains.
    assert score.axes.shape[2] <= features.shape[2] // 2
    assert lengths(score, features).isfinite().all()
