"""The outputs of the classifiers for images that were left out of the statistics, without fitting them again.

Leaving images out of sums is a subtraction, and changes the matrix of a classifier by as many rank-one terms as there
are images. So each matrix is factorised once, with all images in it. Everything that follows for the left-out ones are
products of small matrices, by Woodbury's identity.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.bundle.pooled.cholesky import Triangle
from serving.bundle.pooled.settings import PooledSettings, UnknownScore
from serving.bundle.pooled.solution import (
    Solution,
    Within,
    discriminant,
    mean_margin,
    ridge_regression,
    ridge_triangle,
)
from serving.bundle.pooled.statistics import Statistics

Array = NDArray[np.floating[Any]]
Ids = NDArray[np.integer[Any]]
Rows = NDArray[np.intp]

FOLDS = 20
"""Many folds cost little here, and leave a class nearly as many images as the classifier has."""
MOST = 1000
"""Images of a task that are left out; the statistics of a task with more do not depend on a single image."""


@dataclass(frozen=True)
class LeftOut:
    """Images of a task that are in the statistics, and can be taken out of them."""

    statistics: Statistics
    encoded: Array  # [n, dim]
    class_ids: Ids  # [n]
    fold: NDArray[np.int64]  # [n]
    phi: Array | None = None  # [n, length], if they are not the expansion of `encoded`

    @classmethod
    def of(cls, statistics: Statistics, encoded: Array, class_ids: Ids, seed: int) -> LeftOut:
        """Divide the images of every class into FOLDS parts that are as good as random.

        Of many images, about MOST are drawn, as many of each class as possible. An image that is alone in its class is
        never drawn: the class would not exist without it.
        """
        generator = np.random.default_rng(seed)
        classes, drawn, fold = np.unique(class_ids), [], []
        for number, class_id in enumerate(classes):
            own = generator.permutation(np.flatnonzero(class_ids == class_id))
            if len(own) > 1:
                drawn.append(own[: max(MOST // len(classes), FOLDS)])
                # Classes begin with different folds, or the first folds would hold all images of small classes.
                fold.append((np.arange(len(drawn[-1])) + number) % FOLDS)
        rows = np.concatenate(drawn) if drawn else np.empty(0, np.intp)
        folds = np.concatenate(fold) if fold else np.empty(0, np.int64)
        return cls(statistics, np.asarray(encoded[rows], np.float64), class_ids[rows], folds)

    def __len__(self) -> int:
        return len(self.fold)

    @cached_property
    def columns(self) -> Rows:
        """The output column of each image's class, [n]."""
        return np.searchsorted(self.statistics.class_ids, self.class_ids)

    @cached_property
    def within(self) -> Within:
        return Within.of(self.statistics)

    @cached_property
    def plain(self) -> Statistics:
        """The statistics without the expansion."""
        return self.statistics.plain()

    def folds(self) -> Iterator[Rows]:
        """The images of each fold that has any."""
        for number in range(FOLDS):
            if len(rows := np.flatnonzero(self.fold == number)):
                yield rows


class LeftOutDiscriminant:
    """Linear discriminant analysis without some images, by inner products u' S_w^-1 v of class means and images.

    The covariance is shrunk towards the diagonal of all images, also where its scatter matrix leaves out a fold.
    """

    def __init__(self, images: LeftOut, shrinkage: float, *, alone: bool = False) -> None:
        """`alone`: images are left out one by one, and not by folds."""
        statistics = images.statistics
        dim = statistics.projection.dim
        self.images, self.shrinkage = images, shrinkage
        left_out = 1 if alone else len(images) // FOLDS
        self.freedom = max(statistics.images - left_out - len(statistics.class_ids), 1)
        triangle = Triangle.of(images.within.shrunk(shrinkage, self.freedom))
        self.means, self.vectors = triangle.halved(statistics.means[:, :dim]), triangle.halved(images.encoded)
        """Rows whose inner products are u' S_w^-1 v: [classes, dim] and [n, dim]."""
        self.between = self.means @ self.means.T

    @cached_property
    def margin(self) -> float:
        """By how much a class mean has a higher output for its class than for others, with all images."""
        counts = self.images.statistics.counts
        every = np.eye(len(counts))
        means = every - counts / counts.sum() @ every
        inner = means @ self.between @ means.T
        return mean_margin(inner - np.diag(inner) / 2)

    def without(self, rows: Rows) -> LeftOutOutputs:
        """The outputs for images [r] when all of them are left out; classes that lose all images have no column."""
        statistics, classes = self.images.statistics, len(self.images.statistics.class_ids)
        columns = self.images.columns[rows]
        lost = np.bincount(columns, minlength=classes)
        counts = statistics.counts - lost
        kept = counts > 0
        # Only class means and the images that are left out take part.
        own = self.vectors[rows]
        across = self.means @ own.T
        full = np.block([[self.between, across], [across.T, own @ own.T]])
        unit = np.eye(len(full))
        vectors = unit[classes:]
        # Coefficients of the differences from class means, and of the sum of them in each class.
        residuals = vectors - unit[columns]
        sums = np.stack([residuals[columns == each].sum(axis=0) for each in np.unique(columns)])
        partly = kept[np.unique(columns)]
        shifts = sums[partly] / np.sqrt(counts[np.unique(columns)][partly])[:, None]
        removed = np.concatenate([residuals, shifts]) * np.sqrt((1 - self.shrinkage) / self.freedom)
        moved = removed @ full
        inner = np.linalg.solve(np.eye(len(removed)) - moved @ removed.T, moved)
        freedom = max(int(counts.sum()) - int(kept.sum()), 1)
        products = (full + moved.T @ inner) * freedom / self.freedom
        means = unit[:classes].copy()
        means[np.unique(columns)[partly]] -= sums[partly] / counts[np.unique(columns)][partly][:, None]
        center = counts / counts.sum() @ means
        centred = means[kept] - center
        return LeftOutOutputs(
            along=(vectors - center) @ products @ centred.T,
            between=centred @ products @ centred.T,
            common=(vectors - center / 2) @ products @ center,
            shares=counts[kept] / counts.sum(),
            kept=kept,
        )

    def each_without_itself(self) -> Array:
        """The outputs [n, classes] for every image when this one alone is left out.

        With u = x - m_c and k = n_c / (n_c - 1), the scatter matrix loses k u u', and the mean of the class u / (n_c -
        1). An image that is alone in its class has no output for it: -inf.
        """
        statistics, columns = self.images.statistics, self.images.columns
        every, images = np.arange(len(columns)), statistics.images
        counts = statistics.counts[columns][:, None].astype(np.float64)
        single = counts[:, 0] == 1
        rest = np.maximum(counts - 1, 1)
        apart = self.vectors - self.means[columns]
        center = statistics.counts / images @ self.means
        centers = (images * center - self.vectors) / max(images - 1, 1)
        own = self.means[columns] - apart / rest - centers
        centred = self.vectors - centers

        def products(rows: Array) -> Array:
            """Inner products of rows [n, dim] with the class means relative to the center, each computed without the
            row's own image: [n, classes]."""
            found: Array = rows @ self.means.T - (rows * centers).sum(axis=1)[:, None]
            found[every, columns] = (rows * own).sum(axis=1)
            return found

        along, lost = products(centred), products(apart)
        between = np.diag(self.between) - 2 * centers @ self.means.T + (centers**2).sum(axis=1)[:, None]
        between[every, columns] = (own**2).sum(axis=1)
        weight = (1 - self.shrinkage) / self.freedom * counts / rest
        weight = weight / (1 - weight * (apart**2).sum(axis=1)[:, None])
        along = along + weight * (apart * centred).sum(axis=1)[:, None] * lost
        between = between + weight * lost**2
        freedom = np.maximum(images - 1 - (len(statistics.class_ids) - single), 1)[:, None]
        outputs: Array = (along - between / 2) * freedom / self.freedom
        outputs[single, columns[single]] = -np.inf
        return outputs


@dataclass(frozen=True)
class LeftOutOutputs:
    """Inner products of left-out images and of class means, each relative to the mean m of the other images."""

    along: Array  # [r, classes], (x - m)' S_w^-1 (m_c - m)
    between: Array  # [classes, classes]
    common: Array  # [r], (x - m / 2)' S_w^-1 m
    shares: Array  # [classes]
    kept: NDArray[np.bool_]  # [all classes], those that have a column

    @property
    def outputs(self) -> Array:
        """The outputs of linear discriminant analysis, [r, classes]."""
        outputs: Array = self.along - np.diag(self.between) / 2
        return outputs

    def distances(self, name: UnknownScore) -> Array:
        """The distances of the images from the classes by the score "lda" or "relative", [r, classes]; see
        `serving.bundle.pooled.solution.Solution.distances`."""
        if name == "lda":
            return -self.outputs - self.common[:, None]
        inner = np.linalg.solve(np.diag(1 / self.shares) + self.between, self.along.T).T
        distances: Array = (inner * self.along).sum(axis=1)[:, None] - 2 * self.outputs
        return distances


class LeftOutRidge:
    """Ridge regression without some images. With H = Phi A^-1 Phi' of these images, F their outputs and Y their one-hot
    classes, the outputs for images R without them are (I - H_RR)^-1 (F_R - H_RR Y_R). The penalty stays that of all
    images."""

    def __init__(self, images: LeftOut, ridge: float, *, expanded: bool) -> None:
        statistics = images.statistics if expanded else images.plain
        phi = statistics.projection.expand(images.encoded) if images.phi is None or not expanded else images.phi
        triangle = ridge_triangle(statistics, ridge)
        self.images, self.statistics = images, statistics
        self.all = ridge_regression(statistics, triangle)
        """The regression on all images, none left out."""
        self.margin, self.outputs = self.all.margin, self.all.outputs(phi)
        self.vectors = triangle.halved(phi)
        """Rows whose inner products are H, [n, length]."""

    def without(self, rows: Rows) -> Array:
        """The outputs [r, classes] for images [r] when all of them are left out."""
        vectors = self.vectors[rows]
        own = vectors @ vectors.T
        target = np.eye(self.outputs.shape[1])[self.images.columns[rows]]
        return np.linalg.solve(np.eye(len(rows)) - own, self.outputs[rows] - own @ target)

    def each_without_itself(self) -> Array:
        """The outputs [n, classes] for every image when this one alone is left out."""
        own = (self.vectors**2).sum(axis=1)[:, None]
        target = np.eye(self.outputs.shape[1])[self.images.columns]
        outputs: Array = (self.outputs - own * target) / (1 - own)
        return outputs


def solution_with_all(settings: PooledSettings, ridge: LeftOutRidge) -> Solution:
    """`Solution.of` of the statistics with all images, whose ridge regression is computed already."""
    used = ridge.statistics
    return Solution(used, discriminant(used, settings.shrinkage, ridge.images.within), ridge.all)
