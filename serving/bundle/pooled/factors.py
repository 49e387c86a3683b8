"""The contribution of each class to pooled statistics, stored separately so that a class can be removed exactly.

Per class: the number of images, the sum of their vectors phi(x), and a factor R with R'R = sum (phi - mean)(phi -
mean)' over the images of the class. R comes from a QR decomposition: its rows are mixtures of all images of the class,
and no vector of a single image is stored, unless a class has only one or two. A factor has one row less than the class
has images, and at most as many as a vector has numbers, 4 bytes each: 30 images with vectors of 1,792 numbers take 208
kB.

The Gram matrix of `Statistics` is the sum over these factors, so that a class is removed by leaving its factor out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.bundle.pooled.projection import Projection
from serving.bundle.pooled.statistics import Statistics, StatisticsError

Array = NDArray[np.floating[Any]]
Doubles = NDArray[np.float64]

AT_ONCE = 4096
"""Rows that are multiplied together; all of them at once may not fit into memory."""
MOST_KEPT = 256_000_000
"""Bytes of the factors of all classes that a run keeps, so that servers can learn from it: a checkpoint copies them."""
EXACT = 256
"""Images of a class up to which its stand-ins are exact; those of larger classes are drawn."""


@dataclass(frozen=True)
class ClassFactor:
    """One class: `images` vectors with the sum `total` [length] and the centred factor `rows` [r, length]."""

    images: int
    total: Doubles
    rows: NDArray[np.float32]

    @classmethod
    def of(cls, phi: Array) -> ClassFactor:
        """The class of the vectors [n, length]."""
        exact = np.asarray(phi, dtype=np.float64)
        if exact.ndim != 2 or not len(exact):
            raise StatisticsError(f"factor: vectors have shape {exact.shape}; allowed: [n, length], n from 1")
        total = exact.sum(axis=0)
        # Each vector minus the mean of those before it, weighted: one row less than images, and the same scatter.
        before = np.arange(1, len(exact))[:, None]
        steps = np.sqrt(before / (before + 1)) * (exact[1:] - np.cumsum(exact, axis=0)[:-1] / before)
        triangle: Doubles = np.asarray(np.linalg.qr(steps, mode="r"))
        return cls(len(exact), total, triangle.astype(np.float32))

    @property
    def mean(self) -> Doubles:
        mean: Doubles = self.total / self.images
        return mean

    def stand_ins(self, most: int, seed: int) -> Doubles:
        """Synthetic vectors [n, length] with the same count, sum and scatter matrix as the images of the class.

        They stand for the images where no image is available. At most `most` of them are returned. For a class of more
        than EXACT images they are drawn from a normal distribution with its mean and covariance.
        """
        generator = np.random.default_rng(seed)
        rows = self.rows.astype(np.float64)
        if self.images > EXACT:
            mixed = generator.standard_normal((min(most, self.images), len(rows))) / np.sqrt(self.images)
        else:
            random = generator.standard_normal((self.images, len(rows) + 1))
            random[:, 0] = 1.0
            # Columns of length 1 at right angles to each other and to (1, ..., 1), which keeps the sum.
            mixed = np.linalg.qr(random)[0][:most, 1:]
        drawn: Doubles = self.mean + mixed @ rows
        return drawn


@dataclass(frozen=True)
class ClassFactors:
    """The factors of several classes, in the order of their ids."""

    projection: Projection
    classes: tuple[ClassFactor, ...] = ()

    def with_classes(self, encoded: Array, class_ids: NDArray[np.integer[Any]]) -> ClassFactors:
        """The factors with further classes: vectors [n, dim] of the classes [n], in ascending order of their ids."""
        more = (
            ClassFactor.of(self.projection.expand(encoded[class_ids == class_id])) for class_id in np.unique(class_ids)
        )
        return ClassFactors(self.projection, (*self.classes, *more))

    def without(self, place: int) -> ClassFactors:
        """The factors as if a class had never been learned."""
        return ClassFactors(self.projection, (*self.classes[:place], *self.classes[place + 1 :]))

    def statistics(self) -> Statistics:
        """The sums over all classes, whose ids are their places; a copy that may be changed."""
        return self._summed.copy()

    @cached_property
    def _summed(self) -> Statistics:
        found = Statistics(self.projection)
        found.class_ids = np.arange(len(self.classes))
        found.counts = np.array([each.images for each in self.classes], np.int64)
        found.sums = np.array([each.total for each in self.classes]).reshape(-1, self.projection.length)
        # sum phi phi' of a class is R'R + n m m'. A product of many rows is faster than many products of few.
        for some in self._parts():
            means = [np.sqrt(each.images) * each.mean[None] for each in some]
            rows = np.concatenate([*(each.rows for each in some), *means])
            found.gram += rows.T @ rows
        return found

    def _parts(self) -> Iterator[list[ClassFactor]]:
        """The classes, as many at a time as have about AT_ONCE rows."""
        some, rows = list[ClassFactor](), 0
        for each in self.classes:
            some.append(each)
            rows += len(each.rows)
            if rows >= AT_ONCE:
                yield some
                some, rows = [], 0
        if some:
            yield some

    @property
    def size(self) -> int:
        """Bytes of the factors in a file."""
        return sum(each.rows.nbytes + each.total.nbytes for each in self.classes)

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Everything as arrays, for a file."""
        length = self.projection.length
        return {
            "projection": np.array([self.projection.dim, self.projection.rows, self.projection.seed], dtype=np.int64),
            "counts": np.array([each.images for each in self.classes], np.int64),
            "sums": np.array([each.total for each in self.classes], np.float64).reshape(-1, length),
            "ranks": np.array([len(each.rows) for each in self.classes], np.int64),
            "factors": np.concatenate([np.empty((0, length), np.float32), *(each.rows for each in self.classes)]),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> ClassFactors:
        """The factors of `to_arrays`, the same to the bit; raises a KeyError or a ValueError if they do not fit."""
        projection = Projection(*map(int, arrays["projection"]))
        counts, sums, ranks, factors = (arrays[name] for name in ("counts", "sums", "ranks", "factors"))
        shapes = (counts.shape, ranks.shape, sums.shape, factors.shape)
        if shapes != ((n := len(counts),), (n,), (n, projection.length), (int(ranks.sum()), projection.length)):
            raise StatisticsError(f"factors: arrays of shapes {shapes} do not fit each other")
        ends = np.cumsum(ranks)
        return cls(
            projection,
            tuple(
                ClassFactor(int(count), total.astype(np.float64), factors[end - rank : end].astype(np.float32))
                for count, total, rank, end in zip(counts, sums, ranks, ends, strict=True)
            ),
        )
