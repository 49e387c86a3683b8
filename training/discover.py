"""Group what the server did not know: `python -m training.discover --quarantine URL --bundle BUNDLE`."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from serving.decision import FEATURES, decide
from serving.errors import RequestError
from serving.layout import BundleError
from serving.preprocess import decode, to_pixels
from serving.quarantine import Grouping, Item, StoreError, UnavailableError
from serving.runtime import Model, ProviderError
from training.grouping import MIN_SIZE, cohesion, find_groups
from training.images import DataError
from training.unknowns import ACCEPTED, Address

if TYPE_CHECKING:
    from serving.quarantine.store import Store

NEAR = 0.5
"""A group is near a known class if that is the best guess for at least this share of its images."""
SHIFTED, SURE = 0.8, 0.75
"""It looks like that class, changed, if the share is at least SHIFTED and the confidence (its median) at least SURE."""
BATCH = 64

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Seen:
    """An image as the model of today sees it."""

    item: Item
    features: NDArray[np.float32]
    best_guess: str
    confidence: float


def see(store: Store, items: Sequence[Item], model: Model) -> list[Seen]:
    """What was kept with the images that this very model answered; the others are shown to it, and some it may know."""
    version = model.manifest.version
    seen = []
    again = []
    for item in items:
        if item.model_version == version and {"best_guess", "confidence"} <= item.answer.keys():
            guess, confidence = str(item.answer["best_guess"]), float(item.answer["confidence"])
            seen.append(Seen(item, item.features, guess, confidence))
        else:
            again.append(item)
    if again:
        log.info("%d images were answered by another version than %s: they are shown to it", len(again), version)
    for start in range(0, len(again), BATCH):
        seen += _shown(store, again[start : start + BATCH], model)
    return sorted(seen, key=lambda one: one.item.id)


def _shown(store: Store, items: Sequence[Item], model: Model) -> list[Seen]:
    """What the model says of some images now, without those that it knows by now."""
    readable = [(item, pixels) for item in items if (pixels := _pixels(store, item, model)) is not None]
    if not readable:
        return []
    outputs = model.run(np.stack([pixels for _, pixels in readable]), features=True)
    verdicts = decide(outputs, model.bundle.rule)
    labels = model.manifest.labels
    return [
        Seen(item, outputs[FEATURES][row], labels[verdicts.class_id[row]], float(verdicts.probability[row].max()))
        for row, (item, _) in enumerate(readable)
        if not verdicts.known[row]
    ]


def _pixels(store: Store, item: Item, model: Model) -> NDArray[np.uint8] | None:
    try:
        return to_pixels(decode(store.image(item.id), ACCEPTED), model.manifest.image)
    except UnavailableError:
        raise
    except (RequestError, StoreError) as error:
        log.warning("skipped image %d of the quarantine: %s", item.id, error)
        return None


def group(seen: Sequence[Seen], min_size: int) -> list[Grouping]:
    """The groups, those that look new before those that look known, the largest and tightest first."""
    if not seen:
        return []
    features = np.stack([one.features for one in seen])
    groups = find_groups(features, min_size)
    found = []
    for number, tightness in enumerate(cohesion(features, groups)):
        members = [one for one, place in zip(seen, groups, strict=True) if place == number]
        near, guesses = Counter(one.best_guess for one in members).most_common(1)[0]
        share = guesses / len(members)
        shifted = share >= SHIFTED and float(np.median([one.confidence for one in members])) >= SURE
        ids = [one.item.id for one in members]
        found.append(Grouping(ids, tightness, near if share >= NEAR else None, shifted))
    return sorted(found, key=lambda one: (one.shifted, -len(one.members) * one.cohesion))


def discover(store: Store, model: Model, min_size: int) -> dict[str, Any]:
    """Group the new unknowns, write the groups down, and say in numbers what was found."""
    items = store.items(state="new", kind="unknown")
    seen = see(store, items, model)
    groups = group(seen, min_size)
    store.replace_groups(groups)
    return {
        "images": len(items),
        "known_by_now": len(items) - len(seen),
        "in_no_group": len(seen) - sum(len(one.members) for one in groups),
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


def show(found: dict[str, Any], min_size: int) -> None:
    """What was found, as a table."""
    console = Console()
    if not found["images"]:
        console.print("nothing to group: no unknown image waits in the quarantine", highlight=False)
        return
    table = Table(title=f"{found['images']} unknown images, about {found['new_classes']} new classes")
    for name in ("group", "images", "cohesion"):
        table.add_column(name, justify="right")
    table.add_column("looks like")
    for number, one in enumerate(found["groups"], start=1):
        near = one["near_class"]
        looks = f"{near}, changed" if one["shifted"] else f"something new, near {near}" if near else "something new"
        table.add_row(str(number), str(one["size"]), f"{one['cohesion']:.2f}", looks)
    table.add_section()
    table.add_row("none", str(found["in_no_group"]), "", f"no {min_size} or more of them are alike (--min-size)")
    if found["known_by_now"]:
        table.add_row("none", str(found["known_by_now"]), "", "known to this model, or unreadable")
    console.print(table)
    if found["groups"]:
        console.print("next: name the groups on the page /unknowns, then python -m training.fit --add-unknowns RUN")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m training.discover", description=__doc__)
    parser.add_argument("--quarantine", metavar="URL", help="default: what OPENWORLD_QUARANTINE_URL says")
    parser.add_argument("--images", metavar="PLACE", help="where its images are, if not beside it")
    parser.add_argument("--bundle", type=Path, required=True, metavar="BUNDLE", help="the model that is served")
    parser.add_argument("--min-size", type=int, default=MIN_SIZE, metavar="N", help="smallest group (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    chosen = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        if chosen.min_size < 2:
            raise DataError(f"--min-size is {chosen.min_size}; allowed: 2 or more")
        address = Address(chosen.quarantine, chosen.images) if chosen.quarantine else Address.from_environment()
        if address is None:
            raise DataError("no quarantine: give its URL with --quarantine, or in OPENWORLD_QUARANTINE_URL")
        model = Model.load(chosen.bundle, provider="cpu")
        with address.opened() as store:
            found = discover(store, model, chosen.min_size)
    except (DataError, BundleError, ProviderError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if chosen.json:
        print(json.dumps(found, indent=2))
    else:
        show(found, chosen.min_size)
    return 0


if __name__ == "__main__":
    sys.exit(main())
