"""Matrices in 16 bits per number: rounded when they are made, so that a file restores them to the bit.

Every row has a power of two of its own that no number of the row exceeds. So neither very large nor very small rows
leave the range of 16-bit numbers, and each row keeps 11 significant bits of its largest numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

POWERS = ".powers"
"""What the name of a matrix is followed by for the powers of its rows."""


def rounded(matrix: NDArray[np.floating[Any]]) -> Floats:
    """A matrix [rows, numbers] as a file stores it."""
    return _restored(*_halved(matrix))


def stored(name: str, matrix: Floats) -> dict[str, NDArray[Any]]:
    """A matrix that is rounded already, as arrays for a file."""
    halves, powers = _halved(matrix)
    return {name: halves, name + POWERS: powers}


def restored(name: str, arrays: Mapping[str, NDArray[Any]]) -> Floats:
    """The matrix of `stored`, the same to the bit; raises a KeyError or a ValueError if it is not complete."""
    halves, powers = arrays[name], arrays[name + POWERS]
    if halves.ndim != 2 or powers.shape != halves.shape[:1]:
        raise ValueError(f"{name} has shape {halves.shape} with powers {powers.shape}; allowed: one power per row")
    return _restored(halves, powers)


def _halved(matrix: NDArray[np.floating[Any]]) -> tuple[NDArray[np.float16], NDArray[np.int16]]:
    largest = np.abs(matrix).max(axis=1, initial=0.0)
    mantissa, power = np.frexp(largest)
    # A power of two is its own bound. Rounding may raise the largest number to its bound, and must not change that.
    powers = (power - (mantissa == 0.5)).astype(np.int16)
    return np.ldexp(matrix, -powers[:, None]).astype(np.float16), powers


def _restored(halves: NDArray[Any], powers: NDArray[Any]) -> Floats:
    return np.ldexp(halves.astype(np.float32), powers[:, None].astype(np.int32))
