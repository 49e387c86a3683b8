"""The fixed random expansion."""

from __future__ import annotations

from hashlib import shake_256

import numpy as np
import pytest

from serving.bundle.pooled import Projection, projection


def test_the_projection_is_the_same_everywhere() -> None:
    """Bundles and runs do not store it, so these literal numbers must never change."""
    row = np.arange(1.0, 7.0)[None]
    phi = Projection(6, 3).expand(row)[0]
    assert phi[:6].tolist() == [1, 2, 3, 4, 5, 6]
    np.testing.assert_allclose(phi[6:] * np.sqrt(3), LITERAL)


LITERAL = [1.0, 11.0, 9.0]


@pytest.mark.parametrize(("dim", "rows", "length"), [(64, 0, 64), (64, 16, 80), (100, 64, 228), (128, 130, 388)])
def test_lengths(dim: int, rows: int, length: int) -> None:
    expansion = Projection(dim, rows)
    vectors = np.random.default_rng(0).normal(size=(200, dim))
    phi = expansion.expand(vectors)
    assert phi.shape == (200, length)
    assert expansion.length == length
    assert (phi[:, :dim] == vectors).all()
    assert (phi[:, dim:] >= 0).all()
    if rows:
        np.testing.assert_allclose((phi[:, dim:] ** 2).sum(), (vectors**2).sum(), rtol=0.1)


def test_rows_of_later_passes_are_new_sums_of_other_groups() -> None:
    vectors = np.random.default_rng(0).normal(size=(500, 128))
    phi = Projection(128, 128).expand(vectors)[:, 128:]
    correlation = np.corrcoef(phi.T) - np.eye(256)
    assert np.abs(correlation).max() < 0.8
    assert not np.allclose(phi[:, :128], phi[:, 128:])


def test_signs_are_kept_once_for_all_detectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every detector reads its own projection from its file, and a bundle has one detector per lesson."""
    made: list[bytes] = []

    class Hash:
        def __init__(self, text: bytes) -> None:
            self._hash = shake_256(text)

        def digest(self, size: int) -> bytes:
            made.append(self._hash.digest(size))
            return made[-1]

    monkeypatch.setattr(projection, "shake_256", Hash)
    vectors = np.random.default_rng(0).normal(size=(3, 67))
    first = Projection(67, 9, seed=5).expand(vectors)
    assert len(made) == 2
    assert (Projection(67, 9, seed=5).expand(vectors) == first).all()
    assert len(made) == 2, "another projection of the same numbers"
    assert not (Projection(67, 9, seed=6).expand(vectors) == first).all()
    assert len(made) == 4


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="dim is 0"):
        Projection(0, 1)
    with pytest.raises(ValueError, match="rows is -1"):
        Projection(1, -1)
