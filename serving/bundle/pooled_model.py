"""Classifies the encoded vectors of a bundle: one classifier for all tasks, and one frozen detector per task.

The classifier is computed from statistics over all tasks, so its logits change with every task that is learned. Whether
an image is known is decided by its rank among scores of each task's own images. They are stored when the task is
learned, and can only be compared with distances that are computed in the same way. So the detector of a task is frozen,
and its distances stay bit-identical. The adapter of a task is frozen in the same way.

Classes that were taught have no adapter until they are consolidated. Then they share one, which sharpens the logits
among them, whatever their tasks are.

A class that gets further examples later keeps its column and its detector. A second detector is fitted to all its
further examples, and fitted again when it gets more. The distance of an image from the class is the smaller one of the
two, so images that were known before stay known.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.bundle.pooled import Detector, PooledClassifier
from serving.bundle.pooled.adapters import Adapter, sharpened
from serving.bundle.pooled.classifier import checked, expanded

Outputs = dict[str, NDArray[np.float32]]


@dataclass(frozen=True)
class Extension:
    """Detectors of further examples of some classes; their distances are moved to the scale of the classes' tasks."""

    detector: Detector
    scale: NDArray[np.float64]  # [classes of the detector]
    shift: NDArray[np.float64]  # [classes of the detector]
    used: NDArray[np.bool_]  # [classes of the detector]
    """A class that got more examples since is infinitely far away: a later extension has all of them."""

    def row_distances(self, phi: NDArray[np.float32]) -> NDArray[np.float32]:
        """[classes of the detector] of one expanded vector."""
        return self._moved(self.detector.row_distances(phi))

    def distances(self, encoded: NDArray[np.floating[Any]]) -> NDArray[np.float32]:
        """[n, classes of the detector] of vectors [n, dim]."""
        return self._moved(self.detector.distances(encoded))

    def expanded_distances(self, phi: NDArray[np.floating[Any]]) -> NDArray[np.float32]:
        """[n, classes of the detector] of expanded vectors [n, length]."""
        return self._moved(self.detector.expanded_distances(phi))

    def _moved(self, distances: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.where(self.used, distances * self.scale + self.shift, np.inf).astype(np.float32)

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        return {
            **self.detector.to_arrays(),
            "extension.scale": self.scale,
            "extension.shift": self.shift,
            "extension.used": self.used,
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> Extension:
        detector = Detector.from_arrays(arrays)
        scale, shift = (arrays[f"extension.{name}"].astype(np.float64) for name in ("scale", "shift"))
        if not scale.shape == shift.shape == detector.class_ids.shape:
            raise ValueError(f"extension: scale {scale.shape}, shift {shift.shape}; needed {detector.class_ids.shape}")
        used = arrays.get("extension.used", np.ones(scale.shape, bool)).astype(bool)
        if used.shape != scale.shape:
            raise ValueError(f"extension: used {used.shape}; needed {scale.shape}")
        return cls(detector, scale, shift, used)


@dataclass(frozen=True)
class Consolidated:
    """The adapter of taught classes that were consolidated together, and its weight among them."""

    labels: tuple[str, ...]
    """In the order of the adapter's columns."""
    digests: tuple[tuple[str, ...], ...]
    """Per class, the number of examples that the adapter was learned from and judged by."""
    adapter: Adapter
    weight: float

    def sharpened(
        self, logits: NDArray[np.float32], columns: NDArray[np.int64], views: NDArray[np.floating[Any]]
    ) -> NDArray[np.float32]:
        """Logits [n, classes of all tasks] for vectors [n, rotations, dim]; `columns` are those of its classes."""
        own = self.adapter.logits(views[:, : self.adapter.rotations])
        return sharpened(logits, [columns], [own], self.weight)

    @property
    def images(self) -> int:
        return sum(map(len, self.digests))

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        names = np.frombuffer(json.dumps(self.digests).encode(), np.uint8)
        return {**self.adapter.to_arrays(), WEIGHT: np.array([self.weight]), DIGESTS: names}

    @classmethod
    def from_arrays(cls, labels: tuple[str, ...], arrays: Mapping[str, NDArray[Any]]) -> Consolidated:
        """Raises a KeyError or a ValueError if it is not complete."""
        adapter = Adapter.from_arrays(arrays)
        digests = tuple(tuple(map(str, each)) for each in json.loads(arrays[DIGESTS].tobytes()))
        if adapter is None or not adapter.classes == len(digests) == len(labels):
            raise ValueError(f"no adapter of {len(labels)} classes and their examples")
        return cls(labels, digests, adapter, _weight(arrays))


@dataclass(frozen=True)
class PooledModel:
    """Logits by the classifier of all tasks, sharpened within each task by its adapter if there are adapters; distances
    by the detectors of each of them."""

    classifier: PooledClassifier
    detectors: tuple[Detector, ...]
    adapters: tuple[Adapter, ...] = ()
    """The adapters of the first tasks; tasks that were taught later have none."""
    weight: float = 0.0
    """The weight of the adapters against the statistics."""
    extensions: tuple[tuple[NDArray[np.int64], Extension], ...] = ()
    """Columns of classes, and the detectors of their further examples."""
    consolidated: tuple[tuple[NDArray[np.int64], Consolidated], ...] = ()
    """Columns of taught classes, and the adapter that they share."""

    @property
    def rotations(self) -> int:
        """How many rotations of an image are read."""
        every = (*self.adapters, *(group.adapter for _, group in self.consolidated))
        return max((adapter.rotations for adapter in every), default=1)

    @cached_property
    def columns(self) -> tuple[slice, ...]:
        """The columns of each task."""
        ends = np.cumsum([0, *(len(detector.class_ids) for detector in self.detectors)]).tolist()
        return tuple(slice(start, stop) for start, stop in pairwise(ends))

    def outputs(self, encoded: NDArray[np.floating[Any]]) -> Outputs:
        """`logits` and `distances` [n, classes of all tasks] of vectors [n, dim], or [n, rotations, dim] if several
        rotations are read.

        Rows are computed one by one: matrix products round differently for batches of different sizes, and an answer
        must not depend on the other images of its batch.
        """
        views = encoded if encoded.ndim == 3 else encoded[:, None]
        # Without expansion, phi(x) is the first part of every expanded vector.
        further = (extension.detector for _, extension in self.extensions)
        projections = (self.classifier.projection, *(each.projection for each in (*self.detectors, *further)))
        projection = max(projections, key=lambda each: each.length)
        rows = checked(views[:, 0], projection)
        logits = np.empty((len(rows), self.classifier.classes), np.float32)
        distances = np.empty((len(rows), sum(len(each.class_ids) for each in self.detectors)), np.float32)
        for number, row in enumerate(rows):
            phi = expanded(projection, row)
            logits[number] = self.classifier.row_logits(phi)
            distances[number] = np.concatenate([detector.row_distances(phi) for detector in self.detectors])
            for columns, extension in self.extensions:
                distances[number, columns] = np.minimum(distances[number, columns], extension.row_distances(phi))
        if self.adapters:
            own = [each.logits(views[:, : each.rotations]) for each in self.adapters]
            logits = sharpened(logits, self.columns, own, self.weight)
        for columns, group in self.consolidated:
            logits = group.sharpened(logits, columns, views)
        return {"logits": logits, "distances": distances}

    def expanded_outputs(self, phi: NDArray[np.floating[Any]]) -> Outputs:
        """The outputs of expanded vectors [n, length] by the statistics alone, without adapters.

        All rows are computed at once, which is fast, and what stands in for images has no other form. Answers are never
        computed in this way: the last bits depend on the other rows.
        """
        distances = np.concatenate([detector.expanded_distances(phi) for detector in self.detectors], axis=1)
        for columns, extension in self.extensions:
            distances[:, columns] = np.minimum(distances[:, columns], extension.expanded_distances(phi))
        return {"logits": self.classifier.expanded_logits(phi), "distances": distances}

    def upright(self) -> PooledModel:
        """What can be computed from the upright image alone: without adapters if they read all rotations."""
        return self if self.rotations == 1 else replace(self, adapters=(), weight=0.0, consolidated=())


WEIGHT, DIGESTS = "adapter_weight", "digests"


def weight_arrays(model: PooledModel) -> dict[str, NDArray[Any]]:
    """What the file of the classifier stores of adapters; nothing if there are none."""
    return {WEIGHT: np.array([model.weight])} if model.adapters else {}


def adapters_of(
    pooled: Mapping[str, NDArray[Any]], tasks: Sequence[Mapping[str, NDArray[Any]]]
) -> tuple[tuple[Adapter, ...], float]:
    """The adapters and their weight from the arrays of the classifier and of each task; none and 0 if a bundle has
    none. Raises a KeyError or a ValueError if they are not complete or do not belong together."""
    found = [Adapter.from_arrays(arrays) for arrays in tasks]
    adapters = tuple(adapter for adapter in takewhile(lambda each: each is not None, found) if adapter is not None)
    if any(found[len(adapters) :]) or bool(adapters) != (WEIGHT in pooled):
        having = [task for task, adapter in enumerate(found) if adapter is not None]
        raise ValueError(
            f"tasks {having} of {len(tasks)} have an adapter; allowed: the first ones with {WEIGHT}, or none"
        )
    if len({adapter.rotations for adapter in adapters}) > 1:
        raise ValueError("adapters read different numbers of rotations; allowed: the same")
    return adapters, _weight(pooled) if adapters else 0.0


def _weight(arrays: Mapping[str, NDArray[Any]]) -> float:
    weight = float(arrays[WEIGHT][0])
    if not 0 <= weight <= 1:
        raise ValueError(f"{WEIGHT} is {weight}; allowed: 0 to 1")
    return weight
