"""Sums over encoded images from which the pooled classifier is computed.

Per class they hold the number of images and the sum of their vectors, and for all classes together the Gram matrix
sum phi(x) phi(x)'. Sums add up: the same images give the same statistics, whatever their order and their tasks. No
image is stored, and no vector of a single image unless a class has only one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from serving.bundle.pooled.projection import Projection

Array = NDArray[np.floating[Any]]

CHUNK = 1024
"""Vectors that are expanded at a time, so that a large task needs little memory."""
SAME = 1e-6
"""How far the sum of vectors that are taken out may be from the sum of those that were added, as a share."""


class StatisticsError(ValueError):
    """Vectors or arrays that do not fit the statistics; the message states what was given and what is allowed."""


class Statistics:
    """Count and sum per class, and the common Gram matrix, of vectors phi(x), all in float64.

    `class_ids` [classes] ascends; `counts` [classes] and `sums` [classes, length] are in its order; `gram` is [length,
    length]. A class id is any non-negative number; a run uses the number of the output column.
    """

    def __init__(self, projection: Projection) -> None:
        self.projection = projection
        self.class_ids: NDArray[np.int64] = np.empty(0, np.int64)
        self.counts: NDArray[np.int64] = np.empty(0, np.int64)
        self.sums: NDArray[np.float64] = np.empty((0, projection.length))
        self.gram: NDArray[np.float64] = np.zeros((projection.length, projection.length))

    @classmethod
    def of(cls, encoded: Array, class_ids: ArrayLike, projection: Projection) -> Statistics:
        """The statistics of vectors [n, dim] with their class ids [n]."""
        statistics = cls(projection)
        statistics.add(encoded, class_ids)
        return statistics

    @property
    def images(self) -> int:
        return int(self.counts.sum())

    @property
    def means(self) -> NDArray[np.float64]:
        """The mean of each class, [classes, length]."""
        means: NDArray[np.float64] = self.sums / self.counts[:, None]
        return means

    def add(self, encoded: Array, class_ids: ArrayLike) -> None:
        """Add vectors [n, dim] with their class ids [n]."""
        ids = self._checked_ids(encoded, class_ids)
        self._make_room(np.unique(ids))
        for rows, part in _chunks(encoded, ids):
            self._accumulate(self.projection.expand(rows), part, 1)

    def remove(self, encoded: Array, class_ids: ArrayLike) -> None:
        """Undo `add` of the same vectors; a class without images disappears."""
        ids = self._checked_ids(encoded, class_ids)
        present, numbers = np.unique(ids, return_counts=True)
        for class_id, number in zip(present.tolist(), numbers.tolist(), strict=True):
            held = int(self.counts[self._row(class_id)])
            if number > held:
                raise StatisticsError(
                    f"remove: got {number} vectors of class {class_id}; allowed: at most {held}, as many as were added"
                )
        for rows, part in _chunks(encoded, ids):
            self._accumulate(self.projection.expand(rows), part, -1)
        self._keep(self.counts > 0)

    def merged(self, other: Statistics) -> Statistics:
        """The statistics of the images of both."""
        if other.projection != self.projection:
            raise StatisticsError(
                f"merge: got statistics of {other.projection}; allowed: {self.projection}, as in the other ones"
            )
        both = self.copy()
        both._make_room(other.class_ids)
        at = np.searchsorted(both.class_ids, other.class_ids)
        both.counts[at] += other.counts
        both.sums[at] += other.sums
        both.gram += other.gram
        return both

    def without(self, class_id: int, encoded: Array) -> Statistics:
        """The statistics as if a class had never been added; `encoded` are all its vectors, as they were added.

        The Gram matrix is common to all classes, so the vectors are needed to subtract their part. Others are refused.
        """
        row = self._row(class_id)
        phi = self.projection.expand(encoded)
        difference = np.linalg.norm(phi.sum(axis=0) - self.sums[row])
        if len(phi) != self.counts[row] or difference > SAME * np.sqrt((phi**2).sum() * len(phi)):
            raise StatisticsError(
                f"without: the {len(phi)} vectors are not the {self.counts[row]} that were added for class {class_id}; "
                "allowed: all of these, and no others"
            )
        rest = self.copy()
        rest.remove(encoded, np.full(len(phi), class_id))
        return rest

    def plain(self) -> Statistics:
        """The statistics of the encoded vectors without their expansion."""
        dim = self.projection.dim
        plain = Statistics.__new__(Statistics)
        plain.projection = Projection(dim, 0)
        plain.class_ids, plain.counts = self.class_ids.copy(), self.counts.copy()
        plain.sums, plain.gram = self.sums[:, :dim].copy(), self.gram[:dim, :dim].copy()
        return plain

    def copy(self) -> Statistics:
        twin = Statistics.__new__(Statistics)
        twin.projection = self.projection
        twin.class_ids, twin.counts = self.class_ids.copy(), self.counts.copy()
        twin.sums, twin.gram = self.sums.copy(), self.gram.copy()
        return twin

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Everything as arrays, for a file. The Gram matrix is symmetric, so one triangle is enough."""
        return {
            "projection": np.array([self.projection.dim, self.projection.rows, self.projection.seed], dtype=np.int64),
            "class_ids": self.class_ids.copy(),
            "counts": self.counts.copy(),
            "sums": self.sums.copy(),
            "gram": self.gram[np.tril_indices(len(self.gram))],
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> Statistics:
        """The statistics of `to_arrays`, the same to the bit."""
        names = ("projection", "class_ids", "counts", "sums", "gram")
        if missing := [name for name in names if name not in arrays]:
            raise StatisticsError(f"statistics: arrays {', '.join(missing)} are missing; got {', '.join(arrays)}")
        statistics = cls(Projection(*map(int, arrays["projection"])))
        length, classes = statistics.projection.length, len(arrays["class_ids"])
        shapes = {"counts": (classes,), "sums": (classes, length), "gram": (length * (length + 1) // 2,)}
        for name, shape in shapes.items():
            if arrays[name].shape != shape:
                raise StatisticsError(f"statistics: {name} has shape {arrays[name].shape}; allowed: {shape}")
        statistics.class_ids = arrays["class_ids"].astype(np.int64)
        statistics.counts = arrays["counts"].astype(np.int64)
        statistics.sums = arrays["sums"].astype(np.float64)
        lower = np.tril_indices(length)
        statistics.gram[lower] = arrays["gram"]
        statistics.gram.T[lower] = arrays["gram"]
        return statistics

    def _checked_ids(self, encoded: Array, class_ids: ArrayLike) -> NDArray[np.int64]:
        ids = np.asarray(class_ids)
        if encoded.ndim != 2 or encoded.shape[1] != self.projection.dim or ids.shape != encoded.shape[:1]:
            raise StatisticsError(
                f"statistics: vectors have shape {encoded.shape} and class ids {ids.shape}; "
                f"allowed: [n, {self.projection.dim}] and [n]"
            )
        if ids.size and (not np.issubdtype(ids.dtype, np.integer) or ids.min() < 0):
            raise StatisticsError(f"statistics: class ids are {ids[:5]}; allowed: numbers from 0")
        for rows, _ in _chunks(encoded, ids):
            if not np.isfinite(rows).all():
                raise StatisticsError("statistics: a vector contains NaN or infinity, which would spoil all sums")
        return ids.astype(np.int64)

    def _row(self, class_id: int) -> int:
        row = int(np.searchsorted(self.class_ids, class_id))
        if row == len(self.class_ids) or self.class_ids[row] != class_id:
            raise StatisticsError(f"statistics: no class {class_id}; got classes {self.class_ids.tolist()}")
        return row

    def _make_room(self, class_ids: NDArray[np.int64]) -> None:
        every = np.union1d(self.class_ids, class_ids)
        at = np.searchsorted(every, self.class_ids)
        counts, sums = np.zeros(len(every), np.int64), np.zeros((len(every), self.projection.length))
        counts[at], sums[at] = self.counts, self.sums
        self.class_ids, self.counts, self.sums = every, counts, sums

    def _keep(self, which: NDArray[np.bool_]) -> None:
        self.class_ids, self.counts, self.sums = self.class_ids[which], self.counts[which], self.sums[which]

    def _accumulate(self, phi: NDArray[np.float64], ids: NDArray[np.int64], sign: int) -> None:
        at = np.searchsorted(self.class_ids, ids)
        np.add.at(self.counts, at, sign)
        for row in np.unique(at):
            self.sums[row] += sign * phi[at == row].sum(axis=0)
        self.gram += sign * (phi.T @ phi)


def _chunks(encoded: Array, ids: NDArray[np.int64]) -> Iterator[tuple[Array, NDArray[np.int64]]]:
    for start in range(0, len(ids), CHUNK):
        yield encoded[start : start + CHUNK], ids[start : start + CHUNK]
