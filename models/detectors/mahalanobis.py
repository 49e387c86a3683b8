"""Mahalanobis distances in the deep features: from each class, and relative to that from all the task's images."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from models.config import ROTATIONS
from models.detectors.axes import rounded, write_axes
from models.detectors.score import (
    Features,
    GraphOps,
    Means,
    UnknownScore,
    directions_of,
    write_directions,
    write_squared_distances,
)

SHRINKAGE = 0.1
LEAST_VARIANCE = 1e-3
"""The least total variance of features, which have length 1: below it, rounding errors would look like distance."""
RANK = 32
"""Directions with a variance of their own; all others share the mean of theirs.

On validation images this is as good as using all directions, with a fraction of the numbers to store and to multiply.
"""
TINY = 1e-3
"""A squared distance, per feature, that counts as none."""


class ClassDistances(UnknownScore):
    """Squared distances from the means of groups of images, with one tied covariance per rotation.

    The inverse root of a covariance is level * I + axes * gain * axes^T.
    """

    # Unknown images are grouped by the standardised features, which separate new classes better without the copies.
    fits_copies = False

    means: Tensor  # [4, groups, features], standardised
    axes: Tensor  # [4, features, rank], 8-bit integers; times the scales, orthonormal columns but for rounding
    scales: Tensor  # [4, 1, rank], of the axes
    gain: Tensor  # [4, 1, rank]
    level: Tensor  # [4, 1, 1]

    def __init__(self, name: str, classes: int) -> None:
        super().__init__(name, classes)
        self.register_buffer("means", torch.zeros(ROTATIONS, classes, 0))
        self.register_buffer("axes", torch.zeros(ROTATIONS, 0, 0, dtype=torch.int8))
        self.register_buffer("scales", torch.ones(ROTATIONS, 1, 0))
        self.register_buffer("gain", torch.zeros(ROTATIONS, 1, 0))
        self.register_buffer("level", torch.ones(ROTATIONS, 1, 1))

    def fit_groups(self, features: Tensor, groups: Tensor, count: int) -> None:
        """[4, n, live features] of the training images, and which of `count` groups each belongs to [n]."""
        directions = directions_of(features.double())
        centres, parts = [], []
        for rotated in directions:
            centre = torch.stack([rotated[groups == group].mean(dim=0) for group in range(count)])
            residual = rotated - centre[groups]
            centres.append(centre)
            parts.append(_inverse_root(residual.T @ residual / len(residual), directions.shape[2]))
        columns = zip(*parts, strict=True)
        axes, gain, level = (torch.stack(column).float().to(features.device) for column in columns)
        self.axes, self.scales = rounded(axes)
        self.gain, self.level = gain, level
        self.means = self._standardise(torch.stack(centres).float().to(features.device))

    def standardised(self, features: Tensor) -> Tensor:
        """[4, n, live features] -> the same, with variance 1 / features of each feature within a group."""
        return self._standardise(directions_of(features))

    def _standardise(self, directions: Tensor) -> Tensor:
        axes = self.axes * self.scales
        correction = torch.bmm(torch.bmm(directions, axes), (axes * self.gain).transpose(1, 2))
        return directions * self.level + correction

    def measure(self, features: Features) -> Tensor:
        """[4, n, groups], squared distances per live feature."""
        differences = self.standardised(features.deep)[:, :, None] - self.means[:, None]
        return differences.square().sum(dim=3)

    def write_measure(self, ops: GraphOps, features: Mapping[str, str]) -> str:
        name, direction = self.name, write_directions(ops, features, "deep")
        axes = write_axes(ops, name, self.axes, self.scales)
        gain, level = ops.fitted(f"{name}/gain", self.gain), ops.fitted(f"{name}/level", self.level)
        white = write_standardised(ops, name, direction, axes, gain, level, [0, 2, 1])
        return write_squared_distances(ops, name, white, self.means)


class Mahalanobis(ClassDistances):
    """The logarithm of the squared distance from each class."""

    def fit(self, features: Features, local_classes: Tensor, logits: Tensor) -> None:
        self.fit_groups(features.deep, local_classes, self.classes)

    def score(self, means: Means) -> Tensor:
        return means[self.name].clamp(min=TINY).log()

    def write_score(self, ops: GraphOps, means: Mapping[str, str]) -> str:
        return ops.add("Log", "", [ops.add("Max", "", [means[self.name], ops.constant("tiny", TINY)])])


class Relative(ClassDistances):
    """The squared distance from each class, less the one from the mean of all the task's images."""

    @property
    def needs(self) -> tuple[str, ...]:
        return ("mahalanobis", self.name)

    def fit(self, features: Features, local_classes: Tensor, logits: Tensor) -> None:
        self.fit_groups(features.deep, torch.zeros_like(local_classes), 1)

    def score(self, means: Means) -> Tensor:
        return means["mahalanobis"] - means[self.name]

    def write_score(self, ops: GraphOps, means: Mapping[str, str]) -> str:
        return ops.add("Sub", "", [means["mahalanobis"], means[self.name]])


def write_standardised(
    ops: GraphOps, name: str, direction: str, axes: str, gain: str, level: str, transposed: list[int]
) -> str:
    """`ClassDistances.standardised` as nodes; `transposed` are the dimensions of `axes`, the last two exchanged."""
    gained = ops.fold("Transpose", "back", [ops.fold("Mul", "gained", [axes, gain])], perm=transposed)
    along = ops.add("MatMul", f"{name}/along", [direction, axes])
    correction = ops.add("MatMul", f"{name}/correction", [along, gained])
    return ops.add("Add", f"{name}/white", [ops.add("Mul", f"{name}/levelled", [direction, level]), correction])


def _inverse_root(covariance: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Axes, gain and level of the shrunk covariance; dividing by `count` makes tasks of any width comparable."""
    spherical = covariance.diagonal().sum().clamp(min=LEAST_VARIANCE) / count
    variance, axes = torch.linalg.eigh(covariance)
    shrunk = (1 - SHRINKAGE) * variance.clamp(min=0) + SHRINKAGE * spherical
    kept = min(RANK, count)
    rest = shrunk[: count - kept].mean() if kept < count else spherical
    level = torch.rsqrt(rest * count)
    gain = torch.rsqrt(shrunk[count - kept :] * count) - level
    return axes[:, count - kept :], gain[None], level.view(1, 1)
