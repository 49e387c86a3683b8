"""What follows from the statistics in closed form: linear discriminant analysis (LDA) and ridge regression.

Notation: m_c mean of a class, m mean of all images, S_w covariance within classes of the encoded vectors, shrunk
towards its own diagonal, (1 - a) S + a diag(S).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.bundle.pooled.cholesky import Triangle
from serving.bundle.pooled.settings import PooledSettings, UnknownScore
from serving.bundle.pooled.statistics import Statistics, StatisticsError

Array = NDArray[np.floating[Any]]
Matrix = Array
"""Computed in float64."""

LEAST_VARIANCE = 1e-3
"""A number that hardly varies counts as if it had this share of the mean variance."""
LEAST_MARGIN = 1e-9
"""Class means whose outputs differ by less are equal, as those of a single class are."""


@dataclass(frozen=True)
class Discriminant:
    """Linear discriminant analysis of encoded vectors."""

    center: Matrix  # [dim], m
    means: Matrix  # [classes, dim], m_c - m
    shares: Matrix  # [classes], of all images
    weights: Matrix  # [classes, dim], S_w^-1 (m_c - m)
    pull: Matrix  # [dim], S_w^-1 m

    @cached_property
    def bias(self) -> Matrix:
        """-(m_c - m)' S_w^-1 (m_c - m) / 2, [classes]."""
        bias: Matrix = -(self.weights * self.means).sum(axis=1) / 2
        return bias

    def outputs(self, encoded: Array) -> Matrix:
        """The logarithm of the density of every class over that of a class in m, for vectors [n, dim]: [n, classes]."""
        outputs: Matrix = (encoded - self.center) @ self.weights.T + self.bias
        return outputs

    def uncentred(self, encoded: Array) -> Matrix:
        """x' S_w^-1 m_c - m_c' S_w^-1 m_c / 2 of vectors [n, dim], [n, classes]: the outputs of streaming LDA.

        They differ from `outputs` by x' S_w^-1 m - m' S_w^-1 m / 2, which all classes have in common. So both have the
        same softmax, but not the same largest output.
        """
        common = (encoded - self.center / 2) @ self.pull
        outputs: Matrix = self.outputs(encoded) + common[:, None]
        return outputs

    @cached_property
    def margin(self) -> float:
        return mean_margin(self.means @ self.weights.T + self.bias)

    @cached_property
    def relative_rows(self) -> Matrix:
        """R [classes, dim] with |R (x - m)|^2 = (x - m)' (S_w^-1 - S_t^-1) (x - m), where S_t = S_w + S_b.

        S_b = sum_c share_c (m_c - m)(m_c - m)' is the covariance between classes. By Woodbury's identity the difference
        of the inverses is W' (D^-1 + M W')^-1 W. The rows of M are m_c - m, those of W are S_w^-1 (m_c - m), and D is
        the diagonal matrix of the shares.
        So it needs as many rows as there are classes, and no matrix of the size of S_w.
        """
        inner = np.linalg.inv(np.diag(1 / self.shares) + self.means @ self.weights.T)
        return np.linalg.cholesky((inner + inner.T) / 2).T @ self.weights


@dataclass(frozen=True)
class RidgeRegression:
    """Ridge regression of the one-hot classes on phi(x)."""

    weights: Matrix  # [classes, length]
    margin: float

    def outputs(self, phi: Array) -> Matrix:
        """[n, classes] of expanded vectors [n, length]."""
        outputs: Matrix = phi @ self.weights.T
        return outputs


@dataclass(frozen=True)
class Within:
    """The scatter matrix of encoded vectors within their classes, from which S_w follows for every shrinkage."""

    scatter: Matrix  # [dim, dim]
    freedom: int
    """Degrees of freedom: the number that the scatter matrix is divided by."""

    @classmethod
    def of(cls, statistics: Statistics) -> Within:
        dim, freedom = statistics.projection.dim, max(statistics.images - len(statistics.class_ids), 1)
        between = statistics.sums[:, :dim].T @ statistics.means[:, :dim]
        return cls(np.subtract(statistics.gram[:dim, :dim], between, out=between), freedom)

    def shrunk(self, share: float, divisor: int | None = None) -> Matrix:
        """S_w, [dim, dim]: (1 - share) S + share diag(S), where no entry of the diagonal is below LEAST_VARIANCE of
        their mean. With another `divisor` of the scatter matrix, the diagonal that is shrunk towards stays what it is.

        With one image per class nothing varies within classes; the unit matrix over dim then stands in, because encoded
        vectors have length 1.
        """
        own = np.diag(self.scatter)
        diagonal = np.maximum(own / self.freedom, 0.0)
        mean = float(diagonal.mean())
        if mean <= 1e-12:
            return np.eye(len(own)) / len(own)
        diagonal = np.maximum(diagonal, LEAST_VARIANCE * mean)
        if divisor is not None:
            diagonal = diagonal + (1 - share) * (own / divisor - own / self.freedom)
        result: Matrix = self.scatter * ((1 - share) / (divisor or self.freedom))
        result[np.diag_indices_from(result)] = diagonal
        return result


def discriminant(statistics: Statistics, shrinkage: float, within: Within | None = None) -> Discriminant:
    """Linear discriminant analysis of all classes in the statistics; the expansion of the vectors is not used."""
    if statistics.images == 0:
        raise StatisticsError("discriminant: the statistics are of 0 images; allowed: 1 or more")
    dim, images = statistics.projection.dim, statistics.images
    center = statistics.sums[:, :dim].sum(axis=0) / images
    means = statistics.means[:, :dim] - center
    triangle = Triangle.of((within or Within.of(statistics)).shrunk(shrinkage))
    solved = triangle.solved(np.concatenate([means, center[None]]))
    return Discriminant(center, means, statistics.counts / images, solved[:-1], solved[-1])


def ridge_regression(statistics: Statistics, triangle: Triangle) -> RidgeRegression:
    """(sum phi phi' + l I)^-1 sum phi y', where l is the penalty of the matrix that `triangle` is of.

    Of statistics without expansion, phi(x) = x.
    """
    weights = triangle.solved(statistics.sums)
    return RidgeRegression(weights, mean_margin(statistics.means @ weights.T))


def ridge_triangle(statistics: Statistics, ridge: float) -> Triangle:
    """The Cholesky factor of sum phi phi' + l I, [length, length], where l is `ridge` times the mean of |phi|^2."""
    matrix = statistics.gram.copy()
    matrix[np.diag_indices_from(matrix)] += ridge * max(float(np.trace(statistics.gram)) / statistics.images, 1e-12)
    return Triangle.of(matrix)


def mean_margin(outputs: Matrix) -> float:
    """By how much the mean of a class has a higher output for its class than for the others, on average.

    `outputs` are those of the class means, [classes, classes]. This is the unit in which the outputs of different
    classifiers are mixed; 1 if there is only one class.
    """
    classes = len(outputs)
    if classes < 2:
        return 1.0
    margin = float((np.trace(outputs) - (outputs.sum() - np.trace(outputs)) / (classes - 1)) / classes)
    return margin if margin > LEAST_MARGIN else 1.0


@dataclass(frozen=True)
class Solution:
    """Both classifiers of some statistics, which are without expansion if ridge regression does not use it."""

    statistics: Statistics
    lda: Discriminant
    ridge: RidgeRegression

    @classmethod
    def of(cls, statistics: Statistics, settings: PooledSettings) -> Solution:
        used = statistics if settings.expanded else statistics.plain()
        lda = discriminant(used, settings.shrinkage)
        return cls(used, lda, ridge_regression(used, ridge_triangle(used, settings.ridge)))

    def distances(self, name: UnknownScore, encoded: Array) -> Matrix:
        """The distance of vectors [n, dim] from every class by one score, [n, classes]; higher means more unknown.

        "relative" is (x - m_c)' S_w^-1 (x - m_c) - (x - m)' S_t^-1 (x - m). "lda" is the negative output of streaming
        LDA, which is not relative to the mean m of all images: (m_c - 2 x)' S_w^-1 m_c / 2.
        """
        if name == "ridge":
            return -self.ridge.outputs(self.statistics.projection.expand(encoded))
        if name == "lda":
            return -self.lda.uncentred(encoded)
        common = (((encoded - self.lda.center) @ self.lda.relative_rows.T) ** 2).sum(axis=1)
        distances: Matrix = common[:, None] - 2 * self.lda.outputs(encoded)
        return distances
