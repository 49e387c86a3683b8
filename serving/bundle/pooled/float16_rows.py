"""Matrices as float16 with one power of two per row: rounded when they are made, so that a file restores them exactly.

The power of a row is a bound of its numbers. So neither very large nor very small rows leave the range of float16, and
each row keeps 11 significant bits of its largest numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

POWERS = ".powers"
"""The suffix that names the array with the powers of the rows of a matrix."""


def rounded(matrix: NDArray[np.floating[Any]]) -> Floats:
    """A matrix [rows, numbers] as a file stores it."""
    return _restored(*_as_float16(matrix))


def stored(name: str, matrix: Floats) -> dict[str, NDArray[Any]]:
    """A matrix that is rounded already, as arrays for a file."""
    numbers, powers = _as_float16(matrix)
    return {name: numbers, name + POWERS: powers}


def restored(name: str, arrays: Mapping[str, NDArray[Any]]) -> Floats:
    """The matrix of `stored`, bit for bit; raises a KeyError or a ValueError if it is not complete."""
    numbers, powers = arrays[name], arrays[name + POWERS]
    if numbers.ndim != 2 or powers.shape != numbers.shape[:1]:
        raise ValueError(f"{name} has shape {numbers.shape} with powers {powers.shape}; allowed: one power per row")
    return _restored(numbers, powers)


def _as_float16(matrix: NDArray[np.floating[Any]]) -> tuple[NDArray[np.float16], NDArray[np.int16]]:
    largest = np.abs(matrix).max(axis=1, initial=0.0)
    mantissa, power = np.frexp(largest)
    # A power of two is its own bound. Rounding may raise the largest number to its bound, and must not change that.
    powers = (power - (mantissa == 0.5)).astype(np.int16)
    return np.ldexp(matrix, -powers[:, None]).astype(np.float16), powers


def _restored(numbers: NDArray[Any], powers: NDArray[Any]) -> Floats:
    return np.ldexp(numbers.astype(np.float32), powers[:, None].astype(np.int32))
