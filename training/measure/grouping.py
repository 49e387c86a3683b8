"""Cluster the features of images: any number of groups, and a rest that belongs to no group."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from sklearn.cluster import HDBSCAN
from sklearn.metrics import pairwise_distances, silhouette_score

Floats = NDArray[np.floating]
Groups = NDArray[np.int64]
"""The number of the group of each image, -1 for none."""

NONE = -1
MIN_SIZE = 10
NEIGHBOURS, AGREEING, REACH = 5, 0.8, 1.2
"""An image joins the group of most of its neighbours if it is not much farther from them than its members are."""
DENSITIES = (3, 5, 7, 10)
"""HDBSCAN's min_samples: the best one depends on the images, so all are tried."""
SEPARATE = 0.2
"""Groups with a smaller silhouette are parts of a single group."""
WHOLE = 0.5
"""Weight of the share of grouped images, without which groups lose their outer members to separate better."""
DIRECTIONS = 20
"""Images are compared in the directions in which they vary most. In the others, differences are mostly noise."""
MOST = 2000
"""The maximum number of images that are clustered; of more, a sample is clustered and the others join its groups."""


def find_groups(features: Floats, min_size: int = MIN_SIZE) -> Groups:
    """Group the rows of [n, dimensions]; of several groupings, the one that separates best."""
    count = len(features)
    sample = np.arange(count)
    if count > MOST:
        sample = np.sort(np.random.default_rng(0).permutation(count)[:MOST])
    groups = np.full(count, NONE)
    if count < min_size:
        return groups
    features = _main_directions(features, sample)
    distances = pairwise_distances(features[sample]).astype(np.float64)
    groups[sample] = _best(distances, min_size)
    rest = np.setdiff1d(np.arange(count), sample)
    for part in np.array_split(rest, max(1, -(-len(rest) // MOST))):
        towards = pairwise_distances(features[part], features[sample]) if len(part) else np.empty((0, len(sample)))
        groups[part] = _joined(towards, distances, groups[sample])
    return groups


def _main_directions(features: Floats, sample: NDArray[np.intp]) -> Floats:
    """The features in the DIRECTIONS in which those of the sample vary most."""
    center = features[sample].mean(axis=0)
    axes = np.linalg.svd(features[sample] - center, full_matrices=False)[2][:DIRECTIONS]
    turned: Floats = (features - center) @ axes.T
    return turned


def cohesion(features: Floats, groups: Groups) -> list[float]:
    """For each group, the share of the nearest neighbours of its images that are in it too (0 to 1)."""
    found = []
    for group in range(groups.max(initial=NONE) + 1):
        towards = pairwise_distances(features[groups == group], features)
        nearest = np.argsort(towards, axis=1, kind="stable")[:, 1 : NEIGHBOURS + 1]
        found.append(float((groups[nearest] == group).mean()))
    return found


def _best(distances: Floats, min_size: int) -> Groups:
    """The grouping that separates best; groups that hardly separate are merged into one."""
    best, best_value, best_silhouette = None, -1.0, -1.0
    for groups in _ways(distances, min_size):
        inside = groups != NONE
        silhouette = float(silhouette_score(distances[np.ix_(inside, inside)], groups[inside], metric="precomputed"))
        value = silhouette * inside.mean() ** WHOLE
        if value > best_value:
            best, best_value, best_silhouette = groups, value, silhouette
    if best is None:
        return _single(distances, min_size)
    return best if best_silhouette >= SEPARATE else np.minimum(best, 0)


def _ways(distances: Floats, min_size: int) -> Iterator[Groups]:
    """Groupings with two or more groups, at several densities and smallest sizes."""
    seen = set()
    for density in DENSITIES:
        size = min_size
        while size <= max(min_size, len(distances) // 4):
            groups = _hdbscan(distances, size, density)
            if groups.max() > 0 and groups.tobytes() not in seen:
                seen.add(groups.tobytes())
                yield _filled(distances, groups)
            size = -(-3 * size // 2)


def _single(distances: Floats, min_size: int) -> Groups:
    """A single group, if there are not two; a few images that have nothing in common form none."""
    groups = _hdbscan(distances, min_size, DENSITIES[0], allow_single_cluster=True)
    whole = _filled(distances, np.minimum(groups, 0))
    return whole if (whole == 0).sum() >= 2 * min_size else np.full(len(distances), NONE)


def _hdbscan(distances: Floats, size: int, density: int, **more: bool) -> Groups:
    if len(distances) < max(size, 2):
        return np.full(len(distances), NONE)
    density = min(density, len(distances) - 1)
    method = HDBSCAN(min_cluster_size=size, min_samples=density, metric="precomputed", copy=True, **more)
    return np.asarray(method.fit_predict(distances), dtype=np.int64)


def _filled(distances: Floats, groups: Groups) -> Groups:
    """HDBSCAN keeps only the dense middle of a group: images as close as its outer members join it."""
    rest = groups == NONE
    filled = groups.copy()
    filled[rest] = _joined(distances[rest], distances, groups)
    return filled


def _joined(towards: Floats, distances: Floats, groups: Groups) -> Groups:
    """The group of each row of distances [n, grouped images]: that of nearly all its neighbours, if they are close."""
    inside = (groups != NONE).nonzero()[0]
    found = np.full(len(towards), NONE)
    if len(inside) == 0:
        return found
    reach = {group: _reach(distances, (groups == group).nonzero()[0]) for group in np.unique(groups[inside])}
    nearest = np.argsort(towards[:, inside], axis=1, kind="stable")[:, :NEIGHBOURS]
    for row, columns in enumerate(inside[nearest]):
        names, votes = np.unique(groups[columns], return_counts=True)
        group = names[votes.argmax()]
        if votes.max() >= AGREEING * len(columns) and towards[row, columns].mean() <= reach[group]:
            found[row] = group
    return found


def _reach(distances: Floats, members: NDArray[np.intp]) -> float:
    """The distance within which most members have their neighbours in the group."""
    among = np.sort(distances[np.ix_(members, members)], axis=1)[:, 1 : NEIGHBOURS + 1]
    return float(REACH * np.quantile(among.mean(axis=1), 0.95))
