"""The choice of shrinkage, penalty, mix and temperature of the pooled classifier, on images that were left out."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.bundle.pooled.left_out import LeftOut, LeftOutDiscriminant, LeftOutRidge
from serving.bundle.pooled.settings import PooledSettings

Array = NDArray[np.floating[Any]]
Ids = NDArray[np.integer[Any]]

SHRINKAGES = (0.2, 0.45, 0.75)
RIDGES = tuple((expanded, ridge) for expanded in (False, True) for ridge in (0.02, 0.06, 0.2))
"""Pairs of settings of ridge regression: whether random features are added, and its penalty."""
MIXES = (0.0, 0.25, 0.5, 0.75, 1.0)
TEMPERATURES = np.geomspace(0.01, 1.0, 21)
GRID = (len(SHRINKAGES), len(RIDGES), len(MIXES), len(TEMPERATURES))
"""The candidates, in this order."""

Discriminants = dict[float, LeftOutDiscriminant]
Ridges = dict[tuple[bool, float], LeftOutRidge]


def cross_entropies(images: LeftOut, discriminants: Discriminants, ridges: Ridges) -> NDArray[np.float64]:
    """The cross-entropy of every candidate [GRID], in nats, summed over the images that are left out fold by fold.

    The number of mistakes would be a coarser measure: there are few.
    """
    nats = np.zeros(GRID)
    if len(images.statistics.class_ids) < 2:
        return nats
    for rows in images.folds():
        lda = [discriminants[each].without(rows).outputs / discriminants[each].margin for each in SHRINKAGES]
        ridge = [ridges[each].without(rows) / ridges[each].margin for each in RIDGES]
        for place in np.ndindex(GRID[:3]):
            mix = MIXES[place[2]]
            mixed = (1 - mix) * lda[place[0]] + mix * ridge[place[1]]
            nats[place] += cross_entropy(mixed, images.columns[rows])
    return nats


def cross_entropy(outputs: Array, columns: Ids) -> NDArray[np.float64]:
    """The sum of -log softmax(outputs / temperature) of the true classes [n], at each of TEMPERATURES."""
    shifted = outputs - outputs.max(axis=1, keepdims=True)
    sums = np.exp(shifted / TEMPERATURES[:, None, None]).sum(axis=2)
    true = shifted[np.arange(len(columns)), columns] / TEMPERATURES[:, None]
    nats: NDArray[np.float64] = (np.log(sums) - true).sum(axis=1)
    return nats


def chosen_classifier(nats: NDArray[np.float64]) -> PooledSettings:
    """The candidate with the smallest cross-entropy; the defaults if nothing was measured."""
    if not nats.any():
        return PooledSettings()
    shrinkage, ridge, mix, temperature = np.unravel_index(int(nats.argmin()), GRID)
    expanded, penalty = RIDGES[ridge]
    return PooledSettings(
        shrinkage=SHRINKAGES[shrinkage],
        ridge=penalty,
        expanded=expanded and MIXES[mix] > 0,
        mix=MIXES[mix],
        temperature=float(TEMPERATURES[temperature]),
    )
