"""The choice of the unknown score: classes of a task are left out in turn and play the unknown ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.bundle.pooled.left_out import LeftOut, LeftOutDiscriminant, LeftOutRidge, Rows
from serving.bundle.pooled.settings import Standardised, UnknownScore

Array = NDArray[np.floating[Any]]
Names = tuple[UnknownScore, ...]
Distances = dict[UnknownScore, Array]

CANDIDATES: tuple[Names, ...] = (
    ("relative", "lda", "ridge"),
    ("relative", "lda"),
    ("lda",),
    ("lda", "ridge"),
    ("relative", "ridge"),
    ("relative",),
    ("ridge",),
)
"""The sums that are compared. Each summand is a published form: the relative Mahalanobis distance, the largest output
of streaming LDA, and the largest output of ridge regression.

The sum of all three is taken unless another one is better by more than one standard error of the difference, the
usual rule for choices by few folds (Breiman et al., 1984): a task of few classes has few groups to leave out, and what
is best for these may be far behind for others. No test image takes part, here or in the order.
"""
MEASURED = (3, len(CANDIDATES))
"""What is kept of every candidate: its AUROC and the square of its difference from that of the first one, each summed
over groups of classes that were left out, and the number of these groups."""
LEAST_GROUPS, NOISE = 5, 1.0
"""How many groups it takes to choose another candidate, and by how many standard errors it must be better."""
ALONE: Names = ("lda",)
"""The scores that are used where all images are in the statistics, so that none is left out."""
GROUPS = 5
"""The classes of a task are divided into this many groups, and one group at a time is left out."""
LEAST_SPREAD = 1e-9


def left_out_distances(rows: Rows, discriminant: LeftOutDiscriminant, ridge: LeftOutRidge) -> Distances:
    """The distances of images [r] by every score, when all of them are left out; [r, classes that remain]."""
    lda = discriminant.without(rows)
    return {
        "relative": lda.distances("relative"),
        "lda": lda.distances("lda"),
        "ridge": -ridge.without(rows)[:, lda.kept],
    }


def separations(images: LeftOut, discriminant: LeftOutDiscriminant, ridge: LeftOutRidge) -> NDArray[np.float64]:
    """[MEASURED] by the AUROC of every candidate: images of a group of classes that was never learned against images of
    the task's other classes that were left out with it."""
    found = np.zeros(MEASURED)
    for number, group in enumerate(_groups(images)):
        unknown = np.isin(images.class_ids, group)
        known = (images.fold % GROUPS == number) & ~unknown
        if not known.any() or not unknown.any():
            continue
        rows = np.flatnonzero(known | unknown)
        distances = left_out_distances(rows, discriminant, ridge)
        is_known = known[rows]
        areas = np.zeros(len(CANDIDATES))
        for place, names in enumerate(CANDIDATES):
            summands = [standardised(name, distances[name][is_known]) for name in names]
            scores = summed(distances, summands).min(axis=1)
            areas[place] = auroc(scores[is_known], scores[~is_known])
        found += areas, (areas - areas[0]) ** 2, np.ones(len(CANDIDATES))
    return found


def _groups(images: LeftOut) -> list[NDArray[Any]]:
    """Disjoint groups of the task's classes of which all images can be left out; never all classes of the task."""
    classes, drawn = np.unique(images.class_ids, return_counts=True)
    whole = classes[drawn == images.statistics.counts[np.searchsorted(images.statistics.class_ids, classes)]]
    groups = min(GROUPS, len(whole))
    return [whole[start::groups] for start in range(groups)] if len(classes) > 1 else []


def chosen_unknown(measured: NDArray[np.float64]) -> Names:
    """The first candidate, or the one that separates left-out classes best of those that are clearly better."""
    sums, squares, groups = measured
    if groups[0] < LEAST_GROUPS:
        return CANDIDATES[0]
    better = (sums - sums[0]) / groups
    errors = np.sqrt(np.maximum(squares / groups - better**2, 0.0) / (groups - 1))
    return CANDIDATES[int(np.where(better > NOISE * errors, better, 0.0).argmax())]


def standardised(name: UnknownScore, distances: Array) -> Standardised:
    """A summand with the median and the spread of the smallest distances [n, classes] of known images."""
    smallest = distances.min(axis=1)
    spread = float(smallest.std())
    return Standardised(name=name, center=float(np.median(smallest)), scale=spread if spread > LEAST_SPREAD else 1.0)


def summed(distances: Mapping[UnknownScore, Array], summands: Sequence[Standardised]) -> Array:
    """The sum of standardised distances, [n, classes]."""
    return np.asarray(sum((distances[each.name] - each.center) / each.scale for each in summands))


def auroc(known: Array, unknown: Array) -> float:
    """The probability that an unknown image has the higher score; ties count half."""
    ranked = np.sort(known)
    below = np.searchsorted(ranked, unknown, side="left") + np.searchsorted(ranked, unknown, side="right")
    return float(below.mean() / (2 * len(known)))
