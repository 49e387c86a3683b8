"""Symmetric positive definite matrices by their triangle, A = L L', with numpy alone.

numpy has no function that solves by a triangle, and its Cholesky decomposition of a large matrix takes as long as
`numpy.linalg.solve`. Here the triangle is computed and used in blocks. What remains are triangles of the size of a
block, and products of matrices, which are as fast as the processor is. Vectors are rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating[Any]]
Doubles = NDArray[np.float64]

BLOCK = 128


@dataclass(frozen=True)
class Triangle:
    """L [n, n], whose entries above the diagonal are 0, and the inverses of the blocks on its diagonal."""

    lower: Doubles
    inverses: tuple[Doubles, ...]

    @classmethod
    def of(cls, matrix: Array) -> Triangle:
        """The Cholesky factor of A [n, n]. Eigenvalues that rounding has made negative count as nearly 0."""
        try:
            return cls._decomposed(matrix)
        except np.linalg.LinAlgError:
            values, vectors = np.linalg.eigh(matrix)
            least = np.finfo(np.float64).eps * len(matrix) * max(float(values[-1]), np.finfo(np.float64).tiny)
            lower = np.asarray(np.linalg.qr((vectors * np.sqrt(np.maximum(values, least))).T, mode="r")).T
            return cls(lower, tuple(np.linalg.inv(lower[start:end, start:end]) for start, end in _blocks(len(lower))))

    @classmethod
    def _decomposed(cls, matrix: Array) -> Triangle:
        lower, inverses = np.zeros(matrix.shape), []
        for start, end in _blocks(len(matrix)):
            # The columns of a block, less what the columns before it account for.
            columns = matrix[start:, start:end] - lower[start:, :start] @ lower[start:end, :start].T
            diagonal = np.linalg.cholesky(columns[: end - start])
            inverses.append(np.linalg.inv(diagonal))
            lower[start:end, start:end] = diagonal
            lower[end:, start:end] = columns[end - start :] @ inverses[-1].T
        return cls(lower, tuple(inverses))

    def halved(self, rows: Array) -> Doubles:
        """Z [m, n] with Z Z' = B A^-1 B' for rows B [m, n]; that is B L'^-1."""
        found = np.array(rows, dtype=np.float64, order="C")
        for (start, end), inverse in zip(_blocks(len(self.lower)), self.inverses, strict=True):
            rest = found[:, start:end] - found[:, :start] @ self.lower[start:end, :start].T
            found[:, start:end] = rest @ inverse.T
        return found

    def solved(self, rows: Array) -> Doubles:
        """B A^-1 for rows B [m, n]."""
        found = self.halved(rows)
        for (start, end), inverse in zip(reversed(_blocks(len(self.lower))), reversed(self.inverses), strict=True):
            rest = found[:, start:end] - found[:, end:] @ self.lower[end:, start:end]
            found[:, start:end] = rest @ inverse
        return found


def _blocks(size: int) -> list[tuple[int, int]]:
    """The first row of each block, and that after its last."""
    return list(pairwise([*range(0, size, BLOCK), size]))
