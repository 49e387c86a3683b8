"""A fixed random expansion of encoded vectors: phi(x) = [x, s |P x|].

A linear classifier on phi can separate classes that no linear classifier on x separates. P is made of sign blocks: the
numbers of x are shuffled and cut into groups of GROUP, and each group is multiplied by a matrix of random signs. Signs
and shuffles come from a hash function, so they are the same on every machine and with every version of numpy, and need
not be stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from hashlib import shake_256
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating[Any]]

GROUP = 64
"""Numbers of x that one sign block multiplies."""


@dataclass(frozen=True)
class Projection:
    """The expansion of vectors of length `dim` by `rows` signed sums of each group; with 0 rows phi(x) = x."""

    dim: int
    rows: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.dim < 1:
            raise ValueError(f"projection: dim is {self.dim}; allowed: 1 or more")
        if self.rows < 0:
            raise ValueError(f"projection: rows is {self.rows}; allowed: 0 or more")

    @property
    def groups(self) -> int:
        return -(-self.dim // GROUP)

    @property
    def width(self) -> int:
        """The length of |P x|."""
        return self.groups * self.rows

    @property
    def length(self) -> int:
        """The length of phi(x)."""
        return self.dim + self.width

    def expand(self, encoded: Array) -> NDArray[np.float64]:
        """phi of vectors [n, dim]: [n, length]. Batches of different sizes may differ by rounding errors."""
        rows = np.asarray(encoded, dtype=np.float64)
        parts = [rows]
        for order, signs in _passes(self.dim, self.rows, self.seed):
            padded = np.zeros((len(rows), self.groups * GROUP))
            padded[:, : self.dim] = rows[:, order]
            groups = padded.reshape(len(rows), self.groups, GROUP).transpose(1, 2, 0)
            parts.append(np.abs(signs @ groups).reshape(-1, len(rows)).T * self._scale)
        return np.concatenate(parts, axis=1)

    @property
    def _scale(self) -> float:
        """Makes |P x| on average as long as x."""
        return float(1 / np.sqrt(max(self.rows, 1)))


@lru_cache(maxsize=8)
def _passes(dim: int, rows: int, seed: int) -> list[tuple[NDArray[np.integer[Any]], Array]]:
    """For every GROUP rows, the shuffle of x [dim] and the signs [groups, rows of this pass, GROUP].

    They are kept once for all detectors with the same projection, of which a bundle has one per task and lesson.
    """
    groups = -(-dim // GROUP)
    found: list[tuple[NDArray[np.integer[Any]], Array]] = []
    for start in range(0, rows, GROUP):
        count = min(GROUP, rows - start)
        keys = np.frombuffer(_random(dim, seed, f"order {start}", 8 * dim), dtype="<u8")
        packed = _random(dim, seed, f"signs {start}", groups * count * GROUP // 8)
        signs = np.unpackbits(np.frombuffer(packed, np.uint8)).reshape(groups, count, GROUP) * 2.0 - 1.0
        found.append((np.argsort(keys, kind="stable"), signs))
    return found


def _random(dim: int, seed: int, purpose: str, size: int) -> bytes:
    return shake_256(f"openworld projection {seed} {dim} {purpose}".encode()).digest(size)
