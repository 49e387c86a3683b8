"""Quadratic forms in little room: a diagonal and a few directions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.floating[Any]]

EQUAL = 1e-9
"""Eigenvalues that differ by less, as a share of the largest, are equal."""


@dataclass(frozen=True)
class LowRankForm:
    """x' A x as rest |x / scale|^2 + sum_i weight_i (direction_i . x / scale)^2."""

    scale: NDArray[np.float32]  # [dim]
    directions: NDArray[np.float32]  # [rank, dim], of length 1
    weights: NDArray[np.float32]  # [rank]
    rest: float

    @classmethod
    def of(cls, matrix: Matrix, variances: Matrix, rank: int) -> LowRankForm:
        """The form of a symmetric matrix; `variances` [dim] are the typical squares of the numbers of x.

        In coordinates of variance 1, the eigenvalues that differ most from the mean of the others are kept. All others
        become that mean.
        """
        scale = np.sqrt(variances)
        values, vectors = np.linalg.eigh(matrix * scale[:, None] * scale[None, :])
        kept, rest = _far_from_rest(values, min(rank, len(values)))
        return cls(
            scale=scale.astype(np.float32),
            directions=np.ascontiguousarray(vectors[:, kept].T).astype(np.float32),
            weights=(values[kept] - rest).astype(np.float32),
            rest=rest,
        )

    def prepared(self) -> PreparedForm:
        return PreparedForm((1 / self.scale).astype(np.float32), self.directions, self.weights, self.rest)

    def to_arrays(self, prefix: str) -> dict[str, NDArray[Any]]:
        return {
            f"{prefix}.scale": self.scale,
            f"{prefix}.directions": self.directions,
            f"{prefix}.weights": self.weights,
            f"{prefix}.rest": np.array([self.rest], dtype=np.float64),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]], prefix: str) -> LowRankForm:
        scale, directions, weights, rest = (
            arrays[f"{prefix}.{name}"] for name in ("scale", "directions", "weights", "rest")
        )
        return cls(scale, directions, weights, float(rest[0]))


@dataclass(frozen=True)
class PreparedForm:
    """A form ready for many vectors."""

    inverse_scale: NDArray[np.float32]
    directions: NDArray[np.float32]
    weights: NDArray[np.float32]
    rest: float

    def __call__(self, row: NDArray[np.float32]) -> float:
        """The value for one vector [dim]."""
        scaled = row * self.inverse_scale
        along = (self.directions @ scaled).astype(np.float64)
        return self.rest * float(scaled @ scaled) + float(along**2 @ self.weights)


def _far_from_rest(values: Matrix, rank: int) -> tuple[NDArray[np.int64], float]:
    """Which of ascending eigenvalues to keep, at most `rank` from the two ends so that the others spread least, and the
    mean of the others.

    With few images most eigenvalues are equal. Their eigenvectors are arbitrary, and are never kept.
    """
    middle = max(len(values) - rank, 1)
    sums, squares = (np.concatenate([[0.0], np.cumsum(values**power)]) for power in (1, 2))
    starts = np.arange(len(values) - middle + 1)
    spread = squares[starts + middle] - squares[starts] - (sums[starts + middle] - sums[starts]) ** 2 / middle
    low = int(spread.argmin())
    rest = float(np.mean(values[low : low + middle]))
    kept = np.delete(np.arange(len(values)), np.arange(low, low + middle))
    return kept[np.abs(values[kept] - rest) > EQUAL * np.abs(values).max()], rest
