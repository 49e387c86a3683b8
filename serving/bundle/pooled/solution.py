"""What follows from the statistics in closed form: linear discriminant analysis, ridge regression and covariances.

Notation: m_c mean of a class, m mean of all images, S_w covariance within classes and S_t total covariance of the
encoded vectors, each shrunk towards its own diagonal, (1 - a) S + a diag(S).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.bundle.pooled.projection import Projection
from serving.bundle.pooled.settings import UnknownScore
from serving.bundle.pooled.statistics import Statistics, StatisticsError

Array = NDArray[np.floating[Any]]
Matrix = Array
"""Computed in float64."""

LEAST_VARIANCE = 1e-3
"""A number that hardly varies counts as if it had this share of the mean variance."""


@dataclass(frozen=True)
class Solution:
    """Weights of both classifiers and the covariances of the unknown scores, exact and in float64."""

    projection: Projection
    center: Matrix  # [dim], m
    within: Matrix  # [dim, dim], S_w
    total: Matrix  # [dim, dim], S_t
    lda_weights: Matrix  # [classes, dim]
    lda_bias: Matrix  # [classes]
    ridge_weights: Matrix  # [classes, length]

    @cached_property
    def within_inverse(self) -> Matrix:
        return np.linalg.inv(self.within)

    @cached_property
    def total_inverse(self) -> Matrix:
        return np.linalg.inv(self.total)

    def lda(self, encoded: Array) -> Matrix:
        """m_c' S_w^-1 (x - m) - m_c' S_w^-1 m_c / 2 with m_c relative to m, for vectors [n, dim]: [n, classes]."""
        outputs: Matrix = (encoded - self.center) @ self.lda_weights.T + self.lda_bias
        return outputs

    def ridge(self, encoded: Array) -> Matrix:
        """Ridge regression of the one-hot classes on phi(x): [n, classes]."""
        outputs: Matrix = self.projection.expand(encoded) @ self.ridge_weights.T
        return outputs

    def form(self, name: UnknownScore) -> Matrix | None:
        """The matrix A of the part (x - m)' A (x - m) of a distance that is the same for all classes."""
        if name == "mahalanobis":
            return self.within_inverse
        if name == "relative":
            return self.within_inverse - self.total_inverse
        return None


def class_distances(name: UnknownScore, lda: Array, ridge: Array, forms: Mapping[str, Array]) -> Array:
    """The distance of every image from every class by one score, [n, classes].

    "mahalanobis" is (x - m_c)' S_w^-1 (x - m_c), whose expansion contains -2 times the LDA output, and "relative" is
    that minus (x - m)' S_t^-1 (x - m). `forms` are the values (x - m)' A (x - m) by score, each [n].
    """
    if name == "lda":
        return -lda
    if name == "ridge":
        return -ridge
    distances: Array = forms[name][:, None] - 2 * lda
    return distances


def solve(statistics: Statistics, shrinkage: float, ridge: float) -> Solution:
    """Both classifiers of all classes in the statistics."""
    if statistics.images == 0:
        raise StatisticsError("solve: the statistics are of 0 images; allowed: 1 or more")
    dim = statistics.projection.dim
    images = statistics.images
    gram = statistics.gram[:dim, :dim]
    sums, means = statistics.sums[:, :dim], statistics.means[:, :dim]
    center = sums.sum(axis=0) / images
    within = shrunk((gram - sums.T @ means) / max(images - len(means), 1), shrinkage)
    total = shrunk((gram - images * np.outer(center, center)) / max(images - 1, 1), shrinkage)
    centred = means - center
    lda_weights = np.linalg.solve(within, centred.T).T
    return Solution(
        projection=statistics.projection,
        center=center,
        within=within,
        total=total,
        lda_weights=lda_weights,
        lda_bias=-(lda_weights * centred).sum(axis=1) / 2,
        ridge_weights=ridge_weights(statistics, ridge),
    )


def ridge_weights(statistics: Statistics, ridge: float) -> Matrix:
    """(sum phi phi' + l I)^-1 sum phi y', [classes, length]; l is `ridge` times the mean squared length of phi."""
    penalty = ridge * max(float(np.trace(statistics.gram)) / statistics.images, 1e-12)
    matrix = statistics.gram.copy()
    matrix[np.diag_indices_from(matrix)] += penalty
    return np.linalg.solve(matrix, statistics.sums.T).T


def shrunk(covariance: Matrix, share: float) -> Matrix:
    """(1 - share) covariance + share of its diagonal, whose entries are at least LEAST_VARIANCE of their mean.

    With one image per class nothing varies within classes; the unit matrix over dim then stands in, because encoded
    vectors have length 1.
    """
    diagonal = np.maximum(np.diag(covariance), 0.0)
    mean = float(diagonal.mean())
    if mean <= 1e-12:
        return np.eye(len(covariance)) / len(covariance)
    result = (1 - share) * covariance
    result[np.diag_indices_from(result)] = np.maximum(diagonal, LEAST_VARIANCE * mean)
    return result
