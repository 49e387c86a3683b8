"""A flat map of what the model sees: learned classes and images that it does not know, side by side.

The axes are the two main directions (PCA) of the features of some images of the learned classes. They are fixed at
export, so an image has the same place as long as the bundle is served. More directions are kept for UMAP, which makes
a flat map of what is near in all of them (`serving/bundle/umap_places.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating[Any]]
PER_CLASS = 20
"""Images of a class that are on the map."""
DIRECTIONS = 50
"""Main directions that are kept for UMAP: a few hundred kilobytes in a bundle of a hundred classes."""


@dataclass(frozen=True)
class Embedding:
    """The axes, and the places of some images of each class."""

    center: NDArray[np.float32]  # [dim]
    axes: NDArray[np.float32]  # [2, dim]
    places: NDArray[np.float32]  # [n, 2]
    class_ids: NDArray[np.int64]  # [n]
    directions: NDArray[np.float32] | None = None  # [k, dim], the axes first; None in older bundles
    coordinates: NDArray[np.float32] | None = None  # [n, k]

    @classmethod
    def fit(cls, features: Array, class_ids: NDArray[np.integer[Any]]) -> Embedding:
        """The map of features [n, dim] with their classes; at least three images."""
        if len(features) < 3:
            raise ValueError(f"a map needs 3 images; got {len(features)}")
        center = features.mean(axis=0)
        _, _, found = np.linalg.svd(np.asarray(features - center, np.float64), full_matrices=False)
        found = found[:DIRECTIONS]
        # A direction and its opposite are equally good; take the one whose largest number is positive.
        found = found * np.sign(found[np.arange(len(found)), np.abs(found).argmax(axis=1)])[:, None]
        directions, center = found.astype(np.float32), center.astype(np.float32)
        coordinates = _along(features, center, directions)
        ids = np.asarray(class_ids, np.int64)
        return cls(center, directions[:2], coordinates[:, :2], ids, directions, coordinates)

    @property
    def dim(self) -> int:
        return len(self.center)

    def project(self, features: Array) -> NDArray[np.float32]:
        """The places [n, 2] of features [n, dim]."""
        return _along(features, self.center, self.axes)

    def project_all(self, features: Array) -> NDArray[np.float32] | None:
        """The coordinates [n, k] of features [n, dim] along all directions, if the bundle has them."""
        return None if self.directions is None else _along(features, self.center, self.directions)

    def of_classes(self, numbers: Mapping[int, int]) -> Embedding:
        """The map of some of the classes, by their numbers here and then."""
        kept = np.isin(self.class_ids, list(numbers))
        ids = np.array([numbers[number] for number in self.class_ids[kept].tolist()], np.int64)
        coordinates = None if self.coordinates is None else self.coordinates[kept]
        return Embedding(self.center, self.axes, self.places[kept], ids, self.directions, coordinates)

    def with_images(self, features: Array, class_ids: NDArray[np.integer[Any]]) -> Embedding:
        """The same map with more images, by their features [n, dim] and classes; no image moves."""
        ids = np.concatenate([self.class_ids, np.asarray(class_ids, np.int64)])
        places = np.concatenate([self.places, self.project(features)])
        more = self.project_all(features)
        coordinates = None if self.coordinates is None or more is None else np.concatenate([self.coordinates, more])
        return Embedding(self.center, self.axes, places, ids, self.directions, coordinates)

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        arrays: dict[str, NDArray[Any]] = {"center": self.center, "axes": self.axes, "places": self.places}
        arrays["class_ids"] = self.class_ids
        if self.directions is None or self.coordinates is None:
            return arrays
        return {**arrays, "directions": self.directions, "coordinates": self.coordinates}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> Embedding:
        """The map of `to_arrays`; a ValueError if the arrays do not belong together."""
        more = arrays.get("directions"), arrays.get("coordinates")
        found = cls(arrays["center"], arrays["axes"], arrays["places"], arrays["class_ids"], *more)
        if found.axes.shape != (2, found.dim) or found.places.shape != (len(found.class_ids), 2):
            raise ValueError(f"axes {found.axes.shape} and places {found.places.shape} do not belong together")
        shapes = [None if each is None else each.shape for each in more]
        count = shapes[0][0] if shapes[0] else 0
        if shapes != [None, None] and shapes != [(count, found.dim), (len(found.class_ids), count)]:
            raise ValueError(f"directions {shapes[0]} and coordinates {shapes[1]} do not belong together")
        return found


def _along(features: Array, center: Array, directions: Array) -> NDArray[np.float32]:
    return ((features - center) @ directions.T).astype(np.float32)


def some_of_each(class_ids: NDArray[np.integer[Any]], most: int = PER_CLASS) -> NDArray[np.int64]:
    """Positions of up to `most` images of each class, the same each time."""
    chosen = [np.flatnonzero(class_ids == class_id)[:most] for class_id in np.unique(class_ids)]
    return np.sort(np.concatenate(chosen)) if chosen else np.zeros(0, np.int64)
