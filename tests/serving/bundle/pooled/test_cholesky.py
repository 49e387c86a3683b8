"""Triangles in blocks give what numpy's own solver gives."""

from __future__ import annotations

import numpy as np
import pytest

from serving.bundle.pooled.cholesky import BLOCK, Triangle


@pytest.mark.parametrize("size", [1, 3, BLOCK, BLOCK + 1, 3 * BLOCK + 17])
def test_solves_as_numpy_does(size: int) -> None:
    random = np.random.default_rng(size)
    factor = random.standard_normal((2 * size, size))
    matrix, rows = factor.T @ factor + np.eye(size), random.standard_normal((5, size))
    triangle = Triangle.of(matrix)
    np.testing.assert_allclose(triangle.lower @ triangle.lower.T, matrix, atol=1e-10 * size)
    assert not np.triu(triangle.lower, 1).any()
    wanted = np.linalg.solve(matrix, rows.T).T
    np.testing.assert_allclose(triangle.solved(rows), wanted, atol=1e-10)
    half = triangle.halved(rows)
    np.testing.assert_allclose(half @ half.T, rows @ wanted.T, atol=1e-10)


def test_a_matrix_that_rounding_has_made_indefinite() -> None:
    """What is within the directions that vary is solved; nothing raises, and nothing is infinite."""
    random = np.random.default_rng(0)
    factor = random.standard_normal((20, BLOCK + 30))
    matrix = factor.T @ factor
    matrix[np.diag_indices_from(matrix)] -= 1e-13
    triangle = Triangle.of(matrix)
    np.testing.assert_allclose(triangle.lower @ triangle.lower.T, matrix, atol=1e-8)
    row = factor[:1]
    np.testing.assert_allclose(triangle.solved(row) @ matrix, row, atol=1e-3)
    assert np.isfinite(triangle.solved(random.standard_normal((2, len(matrix))))).all()
