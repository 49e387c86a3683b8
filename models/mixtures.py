"""How likely an image is under each class of a task, where every class is a few Gaussians."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.distance import LEAST_VARIANCE, directions_of
from models.heads import ROTATIONS

RANK = 16
"""Directions in which a component has variances of its own; in all others it has their mean."""
COMPONENTS = 4
ENOUGH_IMAGES = 250
"""A class has a component for every so many training images."""
SHRINKAGE = 0.1
POWER_STEPS = 4
GROUPING_RANK = 24
LARGEST = 127
"""Axes are kept in whole numbers of up to this."""


class ClassMixtures(nn.Module):
    """Negative log-likelihood of every component of every class, per feature, in each rotation.

    Features are first brought to length 1. With the mean m of a component, its largest variances v_r along the axes b_r
    and the mean u of all others, it is |x - m|^2 / u - sum_r (1 / u - 1 / v_r) (b_r (x - m))^2 + log |covariance|.
    x - m is squared as it is: multiplied out, large numbers would cancel where a class's features lie close together.

    Axes are most of what a task remembers, so they are rounded to 8 bits before anything is derived from them: nothing
    is approximated afterwards, the Gaussians are slightly different ones.
    """

    means: Tensor  # [4, components, features]
    levels: Tensor  # [4, 1, components], 1 / u, per feature
    axes: Tensor  # [4, features, components * rank], 8-bit whole numbers
    scales: Tensor  # [4, 1, components * rank], of the axes
    shifts: Tensor  # [4, 1, components * rank], where the means lie on the axes
    volumes: Tensor  # [4, 1, components], per feature

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes = classes
        self.register_buffer("means", torch.zeros(ROTATIONS, classes, 0))
        self.register_buffer("levels", torch.ones(ROTATIONS, 1, classes))
        self.register_buffer("axes", torch.zeros(ROTATIONS, 0, classes, dtype=torch.int8))
        self.register_buffer("scales", torch.ones(ROTATIONS, 1, classes))
        self.register_buffer("shifts", torch.zeros(ROTATIONS, 1, classes))
        self.register_buffer("volumes", torch.zeros(ROTATIONS, 1, classes))

    @property
    def components(self) -> int:
        """Of all classes together."""
        return self.means.shape[1]

    def fit(self, features: Tensor, local_classes: Tensor) -> None:
        """[4, n, features] of the training images and their classes [n]."""
        directions = directions_of(features)
        fewest = int(torch.bincount(local_classes, minlength=self.classes).min())
        number = max(1, min(COMPONENTS, fewest // ENOUGH_IMAGES))
        groups = [
            own
            for local_class in range(self.classes)
            for own in _grouped(directions[:, local_classes == local_class], number)
        ]
        self._fit_groups(groups)

    def _fit_groups(self, groups: list[Tensor]) -> None:
        """[4, n, features] of the images of each component."""
        turns, _, count = groups[0].shape
        means = torch.stack([own.mean(dim=1) for own in groups], dim=1)
        shapes = [[_shape_of(own[turn] - means[turn, place]) for place, own in enumerate(groups)]
                  for turn in range(turns)]  # fmt: skip
        axes, levels, volumes = (
            torch.stack([torch.stack([shape[part] for shape in row]) for row in shapes]) for part in range(3)
        )
        self.means, self.levels, self.volumes = means, levels.unsqueeze(1), volumes.unsqueeze(1)
        self.axes, self.scales = rounded(axes.permute(0, 2, 1, 3).reshape(turns, count, -1))
        on_axes = torch.bmm(means, self._scaled_axes()).view(turns, len(groups), len(groups), -1)
        self.shifts = on_axes.diagonal(dim1=1, dim2=2).transpose(1, 2).reshape(turns, 1, -1)

    def _scaled_axes(self) -> Tensor:
        return self.axes * self.scales

    def each_rotation(self, features: Tensor) -> Tensor:
        """[4, n, features] -> [4, n, components]."""
        directions = directions_of(features)
        apart = torch.cdist(directions, self.means, compute_mode="donot_use_mm_for_euclid_dist").square()
        along = torch.bmm(directions, self._scaled_axes()) - self.shifts
        explained = along.view(*along.shape[:2], self.components, -1).square().sum(dim=3)
        return apart * self.levels - explained + self.volumes

    def nearest(self, likelihoods: Tensor) -> Tensor:
        """[n, components] -> [n, classes], each class's likeliest component."""
        return likelihoods.view(len(likelihoods), self.classes, -1).amin(dim=2)


def rounded(axes: Tensor) -> tuple[Tensor, Tensor]:
    """[4, features, axes] -> the same in 8 bits, and a scale for each axis."""
    scales = (axes.abs().amax(dim=1, keepdim=True) / LARGEST).clamp(min=torch.finfo(axes.dtype).tiny)
    return (axes / scales).round().to(torch.int8), scales


def _grouped(directions: Tensor, number: int) -> list[Tensor]:
    """[4, n, features] of one class -> the same in groups of images that look alike in all rotations."""
    if number == 1:
        return [directions]
    # Takes two seconds to import.
    from sklearn.cluster import KMeans

    flat = directions.transpose(0, 1).flatten(1)
    left, lengths, _ = torch.svd_lowrank(flat - flat.mean(dim=0), q=GROUPING_RANK, niter=POWER_STEPS)
    group = KMeans(number, n_init=4, random_state=0).fit_predict((left * lengths).cpu().numpy())
    chosen = torch.from_numpy(group).to(directions.device)
    return [directions[:, chosen == place] for place in range(number)]


def _shape_of(residuals: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[n, features] around their mean -> scaled axes [features, rank], the weight of the plain squared distance, and
    the log of the volume, the last two per feature."""
    samples, count = residuals.shape
    rank, found = min(RANK, count), min(RANK, count, samples)
    variance, basis = residuals.new_zeros(rank), residuals.new_zeros(count, rank)
    _, deviation, axes = torch.svd_lowrank(residuals, q=found, niter=POWER_STEPS)
    variance[:found], basis[:, :found] = deviation.square() / samples, axes
    total = residuals.square().sum() / samples
    sphere = total.clamp(min=LEAST_VARIANCE) / count
    rest = (total - variance.sum()).clamp(min=0) / (count - rank) if rank < count else sphere
    rest = (1 - SHRINKAGE) * rest + SHRINKAGE * sphere
    own = torch.maximum((1 - SHRINKAGE) * variance + SHRINKAGE * sphere, rest)
    volume = (own.log().sum() + (count - rank) * rest.log()) / count
    return basis * ((1 / rest - 1 / own) / count).sqrt(), 1 / (rest * count), volume
