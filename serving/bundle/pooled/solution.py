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

from serving.bundle.pooled.settings import UnknownScore
from serving.bundle.pooled.statistics import Statistics, StatisticsError

Array = NDArray[np.floating[Any]]
Matrix = Array
"""Computed in float64."""

LEAST_VARIANCE = 1e-3
"""A number that hardly varies counts as if it had this share of the mean variance."""


@dataclass(frozen=True)
class Discriminant:
    """Linear discriminant analysis of encoded vectors, and the covariances of the unknown scores."""

    center: Matrix  # [dim], m
    within: Matrix  # [dim, dim], S_w
    total: Matrix  # [dim, dim], S_t
    weights: Matrix  # [classes, dim]
    bias: Matrix  # [classes]

    def outputs(self, encoded: Array) -> Matrix:
        """m_c' S_w^-1 (x - m) - m_c' S_w^-1 m_c / 2 with m_c relative to m, for vectors [n, dim]: [n, classes]."""
        outputs: Matrix = (encoded - self.center) @ self.weights.T + self.bias
        return outputs

    def form(self, name: UnknownScore) -> Matrix | None:
        """The matrix A of the part (x - m)' A (x - m) of a distance that is the same for all classes."""
        if name == "mahalanobis":
            return self._within_inverse
        if name == "relative":
            return self._within_inverse - np.linalg.inv(self.total)
        return None

    @cached_property
    def _within_inverse(self) -> Matrix:
        return np.linalg.inv(self.within)


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


def discriminant(statistics: Statistics, shrinkage: float) -> Discriminant:
    """Linear discriminant analysis of all classes in the statistics; the expansion of the vectors is not used."""
    if statistics.images == 0:
        raise StatisticsError("discriminant: the statistics are of 0 images; allowed: 1 or more")
    dim, images = statistics.projection.dim, statistics.images
    gram = statistics.gram[:dim, :dim]
    sums, means = statistics.sums[:, :dim], statistics.means[:, :dim]
    center = sums.sum(axis=0) / images
    within = shrunk((gram - sums.T @ means) / max(images - len(means), 1), shrinkage)
    total = shrunk((gram - images * np.outer(center, center)) / max(images - 1, 1), shrinkage)
    centred = means - center
    weights = np.linalg.solve(within, centred.T).T
    return Discriminant(center, within, total, weights, -(weights * centred).sum(axis=1) / 2)


def ridge_weights(statistics: Statistics, ridge: float) -> Matrix:
    """Ridge regression of the one-hot classes on phi(x): (sum phi phi' + l I)^-1 sum phi y', [classes, length]."""
    return np.linalg.solve(ridge_matrix(statistics, ridge), statistics.sums.T).T


def ridge_matrix(statistics: Statistics, ridge: float) -> Matrix:
    """sum phi phi' + l I, [length, length], where l is `ridge` times the mean squared length of phi."""
    matrix = statistics.gram.copy()
    penalty = ridge * max(float(np.trace(statistics.gram)) / statistics.images, 1e-12)
    matrix[np.diag_indices_from(matrix)] += penalty
    return matrix


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
