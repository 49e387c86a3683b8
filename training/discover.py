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

from serving.bundle import BundleError
from serving.decision import FEATURES, decide
from serving.errors import RequestError
from serving.preprocess import decode, to_pixels
from serving.quarantine import Grouping, Item, StoreError, UnavailableError
from serving.runtime import Model, ProviderError
from training.datasets import DataError
from training.grouping import MIN_SIZE, cohesion, find_groups
from training.unknowns import ACCEPTED, Address

if TYPE_CHECKING:
    from serving.quarantine.store import Store

NEAR, SHIFTED = 0.5, 0.8
"""A group is near a known class if that is the best guess for such a share of it, and shows it if it is for more."""
BATCH = 64

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Seen:
    """An image as the model of today sees it."""

    item: Item
    features: NDArray[np.float32]
    best_guess: str


def see(store: Store, items: Sequence[Item], model: Model) -> list[Seen]:
    """What was kept with the images that this very model answered; the others are shown to it again."""
    version = model.manifest.version
    seen = {
        item.id: Seen(item, item.features, str(item.answer["best_guess"]))
        for item in items
        if item.model_version == version and "best_guess" in item.answer
    }
    again = [item for item in items if item.id not in seen]
    if again:
        log.info("%d images were answered by other versions than %s: computing their features", len(again), version)
    for start in range(0, len(again), BATCH):
        some = [
            (item, pixels)
            for item in again[start : start + BATCH]
            if (pixels := _pixels(store, item, model)) is not None
        ]
        if some:
            outputs = model.run(np.stack([pixels for _, pixels in some]), features=True)
            guesses = decide(outputs, model.bundle.rule).class_id
            for row, (item, _) in enumerate(some):
                seen[item.id] = Seen(item, outputs[FEATURES][row], model.manifest.labels[guesses[row]])
    return [seen[item.id] for item in items if item.id in seen]


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
        ids = [one.item.id for one in members]
        found.append(Grouping(ids, tightness, near if share >= NEAR else None, share >= SHIFTED))
    return sorted(found, key=lambda one: (one.shifted, -len(one.members) * one.cohesion))


def discover(store: Store, model: Model, min_size: int) -> tuple[list[Grouping], int]:
    """Group the new unknowns and write the groups down; also how many images that were."""
    seen = see(store, store.items(state="new", kind="unknown"), model)
    groups = group(seen, min_size)
    store.replace_groups(groups)
    return groups, len(seen)


def report(groups: Sequence[Grouping], count: int) -> dict[str, Any]:
    """What was found, in numbers."""
    grouped = sum(len(one.members) for one in groups)
    return {
        "images": count,
        "new_classes": sum(not one.shifted for one in groups),
        "in_no_group": count - grouped,
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
    console = Console()
    if not found["images"]:
        console.print("nothing to group: no unknown image waits in the quarantine", highlight=False)
        return
    if not found["groups"]:
        console.print(
            f"no group in {found['images']} images: none of {min_size} or more are alike (--min-size)", highlight=False
        )
        return
    table = Table(title=f"{found['images']} unknown images, about {found['new_classes']} new classes")
    for name in ("group", "images", "cohesion"):
        table.add_column(name, justify="right")
    table.add_column("looks like")
    for number, one in enumerate(found["groups"], start=1):
        looks = f"{one['near_class']}, changed" if one["shifted"] else "something new"
        if one["near_class"] and not one["shifted"]:
            looks += f", near {one['near_class']}"
        table.add_row(str(number), str(one["size"]), f"{one['cohesion']:.2f}", looks)
    table.add_section()
    table.add_row("none", str(found["in_no_group"]), "", "")
    console.print(table)
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
            found = report(*discover(store, model, chosen.min_size))
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
