"""How far an image is from each class of a task, in the features that the task's own network sees."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.heads import ROTATIONS

SHRINKAGE = 0.1
SHORTEST = 1e-3
"""Features shorter than this have no direction: what is left of them is rounding."""
LEAST_VARIANCE = 1e-3
"""Of all features together, which have length 1: with less, rounding would be taken for distance."""
RANK = 32
"""Directions whose variance is kept one by one; all others share their mean.

As good as all directions on validation images, with a fraction of the numbers to store and to multiply.
"""


def directions_of(features: Tensor) -> Tensor:
    """[rotations, n, features] -> the same with length 1."""
    return functional.normalize(features, dim=2, eps=SHORTEST)


class ClassDistances(nn.Module):
    """Mahalanobis distance to every class mean, one tied covariance a rotation, averaged over the four rotations.

    Fitted once, on the task's own training images, when the task is learned. Stores means and covariances, no image.
    The inverse root of a covariance is level * I + basis * gain * basis^T.
    """

    means: Tensor  # [4, classes, features], standardised
    basis: Tensor  # [4, features, rank], orthonormal columns
    gain: Tensor  # [4, 1, rank]
    level: Tensor  # [4, 1, 1]

    def __init__(self, classes: int, features: int = 0) -> None:
        super().__init__()
        self.classes = classes
        rank = min(RANK, features)
        self.register_buffer("means", torch.zeros(ROTATIONS, classes, features))
        self.register_buffer("basis", torch.zeros(ROTATIONS, features, rank))
        self.register_buffer("gain", torch.zeros(ROTATIONS, 1, rank))
        self.register_buffer("level", torch.ones(ROTATIONS, 1, 1))

    def fit(self, features: Tensor, local_classes: Tensor) -> None:
        """[4, n, live features] of the training images and their classes [n]."""
        directions = directions_of(features.double())
        count = directions.shape[2]
        centres, parts = [], []
        for rotated in directions:
            centre = torch.stack([rotated[local_classes == c].mean(dim=0) for c in range(self.classes)])
            residual = rotated - centre[local_classes]
            centres.append(centre)
            parts.append(_inverse_root(residual.T @ residual / len(residual), count))
        columns = zip(*parts, strict=True)
        basis, gain, level = (torch.stack(column).float().to(features.device) for column in columns)
        self.basis, self.gain, self.level = basis, gain, level
        self.means = self._standardised(torch.stack(centres).float().to(features.device))

    def standardised(self, features: Tensor) -> Tensor:
        """[4, n, live features] -> the same, so that a class of the task has variance 1 / features in each of them."""
        return self._standardised(directions_of(features))

    def _standardised(self, directions: Tensor) -> Tensor:
        correction = torch.bmm(torch.bmm(directions, self.basis), (self.basis * self.gain).transpose(1, 2))
        return directions * self.level + correction

    def forward(self, features: Tensor) -> Tensor:
        """[4, n, live features] -> [n, classes] squared distance per live feature."""
        return self.each_rotation(features).mean(dim=0)

    def each_rotation(self, features: Tensor) -> Tensor:
        """[4, n, live features] -> [4, n, classes], the distances in each rotation."""
        differences = self.standardised(features)[:, :, None] - self.means[:, None]
        return differences.square().sum(dim=3)


def _inverse_root(covariance: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Basis, gain and level of the shrunk covariance; dividing by `count` makes tasks of any width comparable."""
    spherical = covariance.diagonal().sum().clamp(min=LEAST_VARIANCE) / count
    variance, axes = torch.linalg.eigh(covariance)
    shrunk = (1 - SHRINKAGE) * variance.clamp(min=0) + SHRINKAGE * spherical
    kept = min(RANK, count)
    rest = shrunk[: count - kept].mean() if kept < count else spherical
    level = torch.rsqrt(rest * count)
    gain = torch.rsqrt(shrunk[count - kept :] * count) - level
    return axes[:, count - kept :], gain[None], level.view(1, 1)
