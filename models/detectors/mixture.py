"""Negative log-likelihood of each class of a task, where every class is a mixture of a few Gaussians."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from models.config import ROTATIONS
from models.detectors.axes import rounded, write_axes
from models.detectors.mahalanobis import LEAST_VARIANCE
from models.detectors.score import (
    Features,
    GraphOps,
    Means,
    UnknownScore,
    directions_of,
    write_directions,
    write_squared_distances,
)

RANK = 16
"""Directions in which a component has variances of its own; all others share the mean of theirs."""
COMPONENTS = 4
ENOUGH_IMAGES = 1250
"""A class has one component per this many training images and changed copies of them, up to COMPONENTS."""
SHRINKAGE = 0.1
POWER_STEPS = 4
GROUPING_RANK = 24


class ClassMixtures(UnknownScore):
    """Negative log-likelihood of every component of every class, per feature, in the features at one depth.

    Features are first scaled to length 1. With the mean m of a component, its largest variances v_r along the axes b_r
    and the mean u of all others, it is |x - m|^2 / u - sum_r (1 / u - 1 / v_r) (b_r (x - m))^2 + log |covariance|.
    x - m is squared as it is: multiplied out, large numbers would cancel where a class's features lie close together.
    """

    depth: str

    means: Tensor  # [4, components, features]
    levels: Tensor  # [4, 1, components], 1 / u, per feature
    axes: Tensor  # [4, features, components * rank], 8-bit integers
    scales: Tensor  # [4, 1, components * rank], of the axes
    shifts: Tensor  # [4, 1, components * rank], where the means lie on the axes
    volumes: Tensor  # [4, 1, components], per feature

    def __init__(self, name: str, classes: int) -> None:
        super().__init__(name, classes)
        self.register_buffer("means", torch.zeros(ROTATIONS, classes, 0))
        self.register_buffer("levels", torch.ones(ROTATIONS, 1, classes))
        self.register_buffer("axes", torch.zeros(ROTATIONS, 0, classes, dtype=torch.int8))
        self.register_buffer("scales", torch.ones(ROTATIONS, 1, classes))
        self.register_buffer("shifts", torch.zeros(ROTATIONS, 1, classes))
        self.register_buffer("volumes", torch.zeros(ROTATIONS, 1, classes))

    @property
    def components(self) -> int:
        """The number of components of all classes together."""
        return self.means.shape[1]

    def fit(self, features: Features, local_classes: Tensor, logits: Tensor) -> None:
        """Fitted again, to part of the images, it keeps its number of components: measurements keep their columns."""
        directions = directions_of(getattr(features, self.depth))
        number = self.components // self.classes
        if not self.means.shape[2]:
            fewest = int(torch.bincount(local_classes, minlength=self.classes).min())
            number = max(1, min(COMPONENTS, fewest // ENOUGH_IMAGES))
        groups = [
            own
            for local_class in range(self.classes)
            for own in _clusters(directions[:, local_classes == local_class], number)
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

    def measure(self, features: Features) -> Tensor:
        """[4, n, components]."""
        directions = directions_of(getattr(features, self.depth))
        apart = torch.cdist(directions, self.means, compute_mode="donot_use_mm_for_euclid_dist").square()
        along = torch.bmm(directions, self._scaled_axes()) - self.shifts
        explained = along.view(*along.shape[:2], self.components, -1).square().sum(dim=3)
        return apart * self.levels - explained + self.volumes

    def score(self, means: Means) -> Tensor:
        """[n, classes]: each class's likeliest component."""
        likelihoods = means[self.name]
        return likelihoods.view(len(likelihoods), self.classes, -1).amin(dim=2)

    def write_measure(self, ops: GraphOps, features: Mapping[str, str]) -> str:
        name, direction = self.name, write_directions(ops, features, self.depth)
        along = ops.add("MatMul", f"{name}/along", [direction, write_axes(ops, name, self.axes, self.scales)])
        along = ops.add("Sub", f"{name}/along", [along, ops.fitted(f"{name}/shifts", self.shifts)])
        rank = self.axes.shape[2] // self.components
        table = ops.constant(f"table{self.components}x{rank}", [0, 0, self.components, rank])
        along = ops.add("Reshape", f"{name}/components", [along, table])
        explained = ops.add(
            "ReduceSumSquare", f"{name}/explained", [along, ops.constant("last_axis", [-1])], keepdims=0
        )
        apart = write_squared_distances(ops, name, direction, self.means)
        apart = ops.add("Mul", f"{name}/levelled", [apart, ops.fitted(f"{name}/levels", self.levels)])
        plain = ops.add("Add", f"{name}/plain", [apart, ops.fitted(f"{name}/volumes", self.volumes)])
        return ops.add("Sub", f"{name}/likelihood", [plain, explained])

    def write_score(self, ops: GraphOps, means: Mapping[str, str]) -> str:
        each = self.components // self.classes
        if each == 1:
            return means[self.name]
        shape = ops.constant(f"table{self.classes}of{each}", [0, self.classes, each])
        table = ops.add("Reshape", "classes", [means[self.name], shape])
        return ops.add("ReduceMin", "nearest", [table, ops.constant("last_axis", [-1])], keepdims=0)


class ShallowMixture(ClassMixtures):
    """In the features at the tap."""

    depth = "shallow"


class DeepMixture(ClassMixtures):
    """In the features at the end of the body."""

    depth = "deep"


def _clusters(directions: Tensor, number: int) -> list[Tensor]:
    """[4, n, features] of one class -> the same in clusters of images with similar features in all rotations."""
    if number == 1:
        return [directions]
    # Importing it takes two seconds.
    from sklearn.cluster import KMeans

    flat = directions.transpose(0, 1).flatten(1)
    left, lengths, _ = torch.svd_lowrank(flat - flat.mean(dim=0), q=GROUPING_RANK, niter=POWER_STEPS)
    group = KMeans(number, n_init=4, random_state=0).fit_predict((left * lengths).cpu().numpy())
    chosen = torch.from_numpy(group).to(directions.device)
    return [directions[:, chosen == place] for place in range(number)]


def _shape_of(residuals: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[n, features] around their mean -> scaled axes [features, rank], the weight of the plain squared distance and the
    logarithm of the volume, the last two per feature."""
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
