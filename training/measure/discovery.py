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
from serving.bundle.errors import BundleError
from serving.bundle.layout import STATISTICS
from serving.bundle.lessons import Teachable
from serving.bundle.manifest import EXPORT_AGAIN, Bundle
from serving.bundle.model import BundleModel
from serving.bundle.pooled import grouping as pooled_grouping
from serving.quarantine.decoded import item_pixels
from serving.quarantine.records import FoundGroup, Item
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
    spec = model.manifest.image
    readable = [(item, pixels) for item in items if (pixels := item_pixels(store, item, spec)) is not None]
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


def group(images: Sequence[UnknownImage], min_size: int, known: Teachable | None = None) -> list[FoundGroup]:
    """The groups: those that look new before those that look known, the largest and most cohesive first.

    `known` are the statistics of the known classes, which a model with a trunk has.
    """
    if not images:
        return []
    features = np.stack([image.features for image in images])
    groups, cohesions = group_features(features, min_size, known)
    found = []
    for number, tightness in enumerate(cohesions):
        members = [image for image, place in zip(images, groups, strict=True) if place == number]
        near, guesses = Counter(image.best_guess for image in members).most_common(1)[0]
        share = guesses / len(members)
        shifted = share >= SHIFTED and float(np.median([image.confidence for image in members])) >= SURE
        ids = [image.item.id for image in members]
        found.append(FoundGroup(ids, tightness, near if share >= NEAR else None, shifted))
    return sorted(found, key=lambda one: (one.shifted, -len(one.members) * one.cohesion))


def group_features(
    features: NDArray[np.float32], min_size: int, known: Teachable | None = None
) -> tuple[NDArray[np.int64], list[float]]:
    """The number of the group of each row, -1 for none, and the cohesion of each group."""
    if known is not None:
        return _grouped_beside(known, features, min_size)
    groups = find_groups(features, min_size)
    return groups, cohesion(features, groups)


def _grouped_beside(
    known: Teachable, features: NDArray[np.float32], min_size: int
) -> tuple[NDArray[np.int64], list[float]]:
    """Directions in which images of one known class vary count little; known classes also tell how large a group is."""
    rows, class_ids = pooled_grouping.stand_ins(known)
    every = np.concatenate([features, rows.astype(np.float32)])
    turned = pooled_grouping.whitened(every, known.factors.statistics(), known.settings.shrinkage)
    unit = turned[: len(features)]
    cut = pooled_grouping.cut_for(turned[len(features) :], class_ids)
    groups = pooled_grouping.find_groups(unit, cut, min_size)
    return groups, pooled_grouping.cohesion(unit, groups)


def known_classes(bundle: Bundle) -> Teachable | None:
    """The statistics of the classes of a bundle's run, if the bundle has them."""
    if STATISTICS not in bundle.manifest.files:
        return None
    try:
        return Teachable.from_arrays(bundle.arrays(STATISTICS))
    except (KeyError, ValueError) as error:
        raise BundleError(f"{bundle.path / STATISTICS}: {error}; {EXPORT_AGAIN}") from None


def discover(store: Store, model: BundleModel, min_size: int) -> dict[str, Any]:
    """Group the new unknown images, store the groups, and return what was found in numbers."""
    items = store.items(state="new", kind="unknown")
    images = unknown_images(store, items, model)
    groups = group(images, min_size, known_classes(model.bundle))
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
