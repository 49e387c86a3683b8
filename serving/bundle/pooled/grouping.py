"""Groups of similar vectors, with numpy alone: average linkage, cut where known classes would be whole.

Vectors are compared by the angle between them after whitening: directions in which images of one class vary count
little. How far apart images of one class may be is measured on the classes that the model knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from serving.bundle.lessons import Teachable
from serving.bundle.pooled.cholesky import Triangle
from serving.bundle.pooled.solution import Within
from serving.bundle.pooled.statistics import Statistics

Floats = NDArray[np.float64]
Progress = Callable[[float], None]
Groups = NDArray[np.int64]
"""The number of the group of each row, -1 for none."""

NONE = -1
MIN_SIZE = 6
MOST = 2000
"""The maximum number of vectors that are grouped; of more, the latest are grouped, and the others join these groups."""
CUT = 0.6
"""Where the tree is cut: from the mean distance within known classes (0) to that between them (1)."""
USUAL_CUT = 0.85
"""The cut if the model knows a single class. Vectors at right angles have distance 1."""
LEAST_OF_A_CLASS, MOST_OF_A_CLASS = 2, 25
"""Vectors that stand in for the images of a known class, to see how far apart images of one class are."""
NEIGHBOURS = 5
REACH = 0.9
"""A loose image joins a group if it is at least this share as similar to it as nine tenths of its members are."""


def whitened(encoded: NDArray[np.float32], statistics: Statistics, shrinkage: float) -> Floats:
    """Vectors of length 1 [n, dim], whose products are similarities; the statistics are those of known classes."""
    center = statistics.sums[:, : statistics.projection.dim].sum(axis=0) / statistics.images
    turned = Triangle.of(Within.of(statistics).shrunk(shrinkage)).halved(encoded - center)
    lengths = np.linalg.norm(turned, axis=1, keepdims=True)
    unit: Floats = turned / np.maximum(lengths, 1e-12)
    return unit


def stand_ins(teachable: Teachable) -> tuple[Floats, Groups]:
    """Vectors [n, dim] in place of images of the classes of a run, and the number [n] of the class of each."""
    factors = teachable.factors
    most = max(LEAST_OF_A_CLASS, min(MOST_OF_A_CLASS, MOST // max(1, len(factors.classes))))
    rows = [factor.stand_ins(most, seed=0)[:, : factors.projection.dim] for factor in factors.classes]
    return np.concatenate(rows), np.repeat(np.arange(len(rows)), [len(each) for each in rows])


def cut_for(unit: Floats, class_ids: NDArray[np.int64]) -> float:
    """The distance at which to cut a tree of unknown images, from rows of known classes [n]."""
    distances = 1.0 - unit @ unit.T
    same = class_ids[:, None] == class_ids[None, :]
    between = distances[~same]
    np.fill_diagonal(same, False)
    within = distances[same]
    if not within.size or not between.size:
        return USUAL_CUT
    return float((1 - CUT) * within.mean() + CUT * between.mean())


def find_groups(unit: Floats, cut: float, min_size: int = MIN_SIZE, progress: Progress = lambda share: None) -> Groups:
    """Group rows of length 1 [n, dim]; groups are numbered by size, the largest first."""
    groups = np.full(len(unit), NONE)
    first = max(0, len(unit) - MOST)
    sample = unit[first:]
    if len(sample) < max(min_size, 2):
        return groups
    distances = 1.0 - sample @ sample.T
    merges = list(_average_linkage(distances, progress))
    groups[first:] = _cut(len(sample), merges, cut, min_size)
    if (groups == NONE).any() and (groups != NONE).any():
        groups = _joined(unit, groups)
    return _by_size(groups, min_size)


def nearest_group(unit: Floats, groups: Groups) -> tuple[Groups, Floats]:
    """For every row the group whose nearest members are most similar on average, and that similarity."""
    numbers = np.unique(groups[groups != NONE])
    if not len(numbers):
        return np.full(len(unit), NONE), np.zeros(len(unit))
    similarity = np.stack([_to_group(unit, unit[groups == number], groups == number) for number in numbers], axis=1)
    best = similarity.argmax(axis=1)
    return numbers[best], similarity[np.arange(len(unit)), best]


def cohesion(unit: Floats, groups: Groups) -> list[float]:
    """For each group, the share of the nearest neighbours of its members that are in it too (0 to 1)."""
    found = []
    for number in range(groups.max(initial=NONE) + 1):
        own = np.flatnonzero(groups == number)
        similarity = unit[own] @ unit.T
        similarity[np.arange(len(own)), own] = -np.inf
        count = min(NEIGHBOURS, len(unit) - 1, max(len(own) - 1, 1))
        nearest = np.argpartition(-similarity, count - 1, axis=1)[:, :count]
        found.append(float((groups[nearest] == number).mean()))
    return found


def _average_linkage(distances: Floats, progress: Progress) -> Iterator[tuple[int, int, float]]:
    """The merges of a tree: (kept row, merged row, distance), found by following nearest neighbours in turn."""
    matrix = distances.copy()
    count = len(matrix)
    np.fill_diagonal(matrix, np.inf)
    sizes = np.ones(count)
    alive = np.ones(count, bool)
    chain: list[int] = []
    done = 0
    while done < count - 1:
        if not chain:
            chain.append(int(np.flatnonzero(alive)[0]))
        while True:
            last = chain[-1]
            row = matrix[last]
            near = int(row.argmin())
            # Ties are resolved in favour of the one before, so that the chain ends.
            if len(chain) > 1 and row[chain[-2]] <= row[near]:
                near = chain[-2]
            if len(chain) > 1 and near == chain[-2]:
                break
            chain.append(near)
        one, other = chain.pop(), chain.pop()
        height = float(matrix[one, other])
        merged = (sizes[one] * matrix[one] + sizes[other] * matrix[other]) / (sizes[one] + sizes[other])
        keep, gone = min(one, other), max(one, other)
        matrix[keep], matrix[:, keep] = merged, merged
        matrix[gone], matrix[:, gone] = np.inf, np.inf
        matrix[keep, keep] = np.inf
        sizes[keep] += sizes[gone]
        alive[gone] = False
        done += 1
        if done % 64 == 0:
            progress(done / count)
        yield keep, gone, height


def _cut(count: int, merges: list[tuple[int, int, float]], height: float, min_size: int) -> Groups:
    """The groups of all merges below a height; small ones are none."""
    parent = np.arange(count)

    def root(row: int) -> int:
        while parent[row] != row:
            parent[row] = parent[parent[row]]
            row = int(parent[row])
        return row

    for one, other, at in merges:
        if at < height:
            parent[root(other)] = root(one)
    roots = np.array([root(row) for row in range(count)])
    return _by_size(roots, min_size)


def _by_size(groups: Groups, min_size: int) -> Groups:
    numbers, counts = np.unique(groups[groups != NONE], return_counts=True)
    found = np.full(len(groups), NONE)
    order = np.argsort(-counts, kind="stable")
    for place, number in enumerate(numbers[order][counts[order] >= min_size]):
        found[groups == number] = place
    return found


def _joined(unit: Floats, groups: Groups) -> Groups:
    """Rows without a group join one if they are about as similar to it as its own members are."""
    number, similarity = nearest_group(unit, groups)
    joined = groups.copy()
    for group in np.unique(groups[groups != NONE]):
        own = groups == group
        limit = REACH * float(np.quantile(_to_group(unit[own], unit[own], np.ones(int(own.sum()), bool)), 0.1))
        joined[(groups == NONE) & (number == group) & (similarity >= limit)] = group
    return joined


def _to_group(unit: Floats, members: Floats, is_member: NDArray[np.bool_]) -> Floats:
    """The mean similarity of each row to its nearest members, of which it may be one itself."""
    similarity = unit @ members.T
    similarity[np.flatnonzero(is_member), np.arange(len(members))] = -np.inf
    count = min(NEIGHBOURS, max(len(members) - 1, 1))
    nearest = -np.partition(-similarity, count - 1, axis=1)[:, :count]
    mean: Floats = np.where(np.isfinite(nearest), nearest, 0.0).mean(axis=1)
    return mean
