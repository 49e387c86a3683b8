"""The map of the quarantine: the places of its images among those of the learned classes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from serving.bundle.embedding import Embedding
from serving.bundle.manifest import Bundle
from serving.bundle.umap_places import UmapError, installed
from serving.quarantine.api import schemas
from serving.quarantine.api.umap_process import UmapProcess

if TYPE_CHECKING:
    from serving.quarantine.records import Outlined
    from serving.quarantine.store import Store

AT_A_TIME = 500
"""Items whose features are in memory together."""
Numbers = NDArray[np.float32]
Place = tuple[float, float]


class PlaceCache:
    """The places of the items by the map of one bundle; features never change, so each is projected once."""

    def __init__(self, bundle: Bundle) -> None:
        self.version = bundle.manifest.version
        self.labels = bundle.manifest.labels
        self._embedding: Embedding | None = bundle.embedding()
        self._coordinates: dict[int, Numbers | None] = {}
        """Item -> its coordinates along all directions, the two axes first; None if its features do not fit."""
        self._umap = UmapProcess()

    @property
    def _methods(self) -> tuple[schemas.MapMethod, ...]:
        with_umap = self._embedding is not None and self._embedding.directions is not None and installed()
        return ("pca", "umap") if with_umap else ("pca",)

    def overview(self, store: Store, method: schemas.MapMethod = "pca") -> schemas.EmbeddingMap:
        """Learned images and items with their places; items whose features do not fit the map are counted.

        While UMAP computes, the map is by PCA. Raises a UmapError if it cannot be used.
        """
        outline, embedding = store.outline(), self._embedding
        if method == "umap" and (embedding is None or embedding.coordinates is None):
            raise UmapError("the bundle has no map for UMAP: got umap; allowed: a new export of the run, or pca")
        if embedding is None:
            return self._made(outline, (), {})
        self._complete(store, [item.id for item in outline], embedding)
        found = {number: each for number, each in self._coordinates.items() if each is not None}
        learned, items = embedding.places, {number: each[:2] for number, each in found.items()}
        if method == "pca" or embedding.coordinates is None:
            return self._made(outline, learned, items)
        places = self._umap.places(np.concatenate([embedding.coordinates, *(each[None] for each in found.values())]))
        if places is None:
            return self._made(outline, learned, items, computing=True)
        count = len(embedding.coordinates)
        return self._made(outline, places[:count], dict(zip(found, places[count:], strict=True)), "umap")

    def _made(
        self,
        outline: list[Outlined],
        learned: Iterable[Numbers],
        items: dict[int, Numbers],
        method: schemas.MapMethod = "pca",
        *,
        computing: bool = False,
    ) -> schemas.EmbeddingMap:
        class_ids = [] if self._embedding is None else self._embedding.class_ids.tolist()
        return schemas.EmbeddingMap(
            version=self.version,
            method=method,
            methods=self._methods,
            computing=computing,
            labels=self.labels,
            learned=tuple((*_place(place), number) for place, number in zip(learned, class_ids, strict=True)),
            items=tuple(
                schemas.PlacedItem(id=item.id, x=x, y=y, group=item.group, state=item.state, label=item.label)
                for item in outline
                if item.id in items
                for x, y in [_place(items[item.id])]
            ),
            left_out=sum(item.id not in items for item in outline),
        )

    def _complete(self, store: Store, ids: list[int], embedding: Embedding) -> None:
        known = self._coordinates
        # In the order of the items, so that UMAP gets the same points from every worker.
        self._coordinates = {number: known.get(number) for number in ids}
        missing = [number for number in ids if number not in known]
        for start in range(0, len(missing), AT_A_TIME):
            some = store.features(missing[start : start + AT_A_TIME])
            fitting = {number: row for number, row in some.items() if row.shape == (embedding.dim,)}
            if fitting:
                features = np.stack(list(fitting.values()))
                found = embedding.project_all(features)
                found = embedding.project(features) if found is None else found
                for number, row in zip(fitting, found, strict=True):
                    self._coordinates[number] = row if np.isfinite(row).all() else None


def _place(numbers: Numbers) -> Place:
    return round(float(numbers[0]), 4), round(float(numbers[1]), 4)
