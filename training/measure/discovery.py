"""Group the images that servers called unknown, by the features of the model that is served now."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from serving.bundle.decision import FEATURES, decide
from serving.bundle.errors import ImageError
from serving.bundle.model import BundleModel
from serving.bundle.pixels import ANY_SIZE, open_image, to_pixels
from serving.quarantine.records import FoundGroup, Item, StoreError, UnavailableError
from training.measure.grouping import cohesion, find_groups

if TYPE_CHECKING:
    from serving.quarantine.store import Store

NEAR = 0.5
"""A group is near a known class if that class is the best guess for at least this share of its images."""
SHIFTED, SURE = 0.8, 0.75
"""It looks like a changed version of that class if the share is at least SHIFTED and the median confidence at least
SURE."""
BATCH = 64

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class UnknownImage:
    """An image of the quarantine with its features and best guess by the current model."""

    item: Item
    features: NDArray[np.float32]
    best_guess: str
    confidence: float


def unknown_images(store: Store, items: Sequence[Item], model: BundleModel) -> list[UnknownImage]:
    """The images that the model calls unknown: by the stored answer if it is from this version, else by a new one."""
    version = model.manifest.version
    found = []
    again = []
    for item in items:
        if item.damage is not None:
            log.warning("item %d is left out: %s", item.id, item.damage)
        elif item.model_version == version and {"best_guess", "confidence"} <= item.answer.keys():
            guess, confidence = str(item.answer["best_guess"]), float(item.answer["confidence"])
            found.append(UnknownImage(item, item.features, guess, confidence))
        else:
            again.append(item)
    if again:
        log.info("%d images were answered by other versions than %s; they are answered again", len(again), version)
    for start in range(0, len(again), BATCH):
        found += _answered_again(store, again[start : start + BATCH], model)
    return sorted(found, key=lambda image: image.item.id)


def _answered_again(store: Store, items: Sequence[Item], model: BundleModel) -> list[UnknownImage]:
    """The images that the model calls unknown now, too."""
    readable = [(item, pixels) for item in items if (pixels := _pixels(store, item, model)) is not None]
    if not readable:
        return []
    outputs = model.run(np.stack([pixels for _, pixels in readable]), features=True)
    verdicts = decide(outputs, model.bundle.rule)
    labels = model.manifest.labels
    return [
        UnknownImage(
            item, outputs[FEATURES][row], labels[verdicts.class_id[row]], float(verdicts.probability[row].max())
        )
        for row, (item, _) in enumerate(readable)
        if not verdicts.known[row]
    ]


def _pixels(store: Store, item: Item, model: BundleModel) -> NDArray[np.uint8] | None:
    try:
        return to_pixels(open_image(store.image(item.id), ANY_SIZE), model.manifest.image)
    except UnavailableError:
        raise
    except (ImageError, StoreError) as error:
        log.warning("skipped image %d of the quarantine: %s", item.id, error)
        return None


def group(images: Sequence[UnknownImage], min_size: int) -> list[FoundGroup]:
    """The groups: those that look new before those that look known, the largest and most cohesive first."""
    if not images:
        return []
    features = np.stack([image.features for image in images])
    groups = find_groups(features, min_size)
    found = []
    for number, tightness in enumerate(cohesion(features, groups)):
        members = [image for image, place in zip(images, groups, strict=True) if place == number]
        near, guesses = Counter(image.best_guess for image in members).most_common(1)[0]
        share = guesses / len(members)
        shifted = share >= SHIFTED and float(np.median([image.confidence for image in members])) >= SURE
        ids = [image.item.id for image in members]
        found.append(FoundGroup(ids, tightness, near if share >= NEAR else None, shifted))
    return sorted(found, key=lambda one: (one.shifted, -len(one.members) * one.cohesion))


def discover(store: Store, model: BundleModel, min_size: int) -> dict[str, Any]:
    """Group the new unknown images, store the groups, and return what was found in numbers."""
    items = store.items(state="new", kind="unknown")
    images = unknown_images(store, items, model)
    groups = group(images, min_size)
    store.replace_groups(groups)
    return {
        "images": len(items),
        "known_by_now": len(items) - len(images),
        "in_no_group": len(images) - sum(len(one.members) for one in groups),
        "new_classes": sum(not one.shifted for one in groups),
        "groups": [
            {
                "size": len(one.members),
                "cohesion": round(one.cohesion, 3),
                "near_class": one.near_class,
                "shifted": one.shifted,
            }
            for one in groups
        ],
    }
