"""The job that groups unlabelled images: which group a loose image resembles, and which class a group is near."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from serving.bundle.model import BundleModel
from serving.quarantine.store import Store
from serving.teaching.group_job import group_unknowns
from tests.helpers_quarantine import arrival
from tests.helpers_teaching import picture, write_bundle


class Nowhere:
    """Shows the progress to nobody."""

    def part(self, step: str, start: float, end: float) -> Callable[[float], None]:
        return lambda share: None


def clear(label: str, number: int) -> NDArray[np.float64]:
    """The mean of three pictures: less noise."""
    files = [picture(label, number + 1000 * each) for each in range(3)]
    return np.mean([np.asarray(Image.open(io.BytesIO(file)), float) for file in files], axis=0)


def pattern(number: int) -> NDArray[np.float64]:
    return np.random.default_rng([99, number]).uniform(0, 255, (4, 4, 3)).repeat(8, 0).repeat(8, 1)


def png(pixels: NDArray[np.float64]) -> bytes:
    stored = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(stored, "PNG")
    return stored.getvalue()


def test_groups_loose_images_and_the_nearest_class(tmp_path: Path) -> None:
    model = BundleModel.load(write_bundle(tmp_path / "bundle"), provider="cpu", threads=1)
    shown = {
        "elk": [png(clear("elk", number)) for number in range(12)],
        "hen": [png(clear("hen", number)) for number in range(12)],
        # Unknown, but like no other class as much as like ants.
        "half an ant": [png((clear("ant", number) + clear("fish", number)) / 2) for number in range(200, 210)],
        # A pattern of its own for each, with some of a class.
        "like elk": [png(0.15 * clear("elk", number) + 0.85 * pattern(number)) for number in range(300, 304)],
        "like hen": [png(0.15 * clear("hen", number) + 0.85 * pattern(number)) for number in range(400, 404)],
    }
    store = Store.open(f"sqlite:///{tmp_path}/quarantine.db", str(tmp_path / "images"))
    kinds = {}
    for kind, files in shown.items():
        kinds |= dict.fromkeys(store.add([arrival(content=file) for file in files]).ids, kind)
    found = group_unknowns(store, model, Nowhere())
    groups = {group.id: Counter(kinds[number] for number in store.members(group.id)) for group in store.groups()}
    main = {number: counts.most_common(1)[0][0] for number, counts in groups.items()}
    assert sorted(main.values()) == ["elk", "half an ant", "hen"]
    near = {main[group.id]: group.near_class for group in store.groups()}
    assert near["half an ant"] == "ant"
    assert near["elk"] != "ant"
    loose = [item.id for item in store.items(group=None, state="new")]
    resembled = {(kinds[number], main[group]) for number, (group, _) in store.resemblances(loose).items()}
    assert resembled == {("like elk", "elk"), ("like hen", "hen")}
    assert found["groups"] == 3
    assert found["images"] == sum(map(len, shown.values()))
    assert found["loose"] == len(store.resemblances(loose)) > 0
    store.close()
