from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from export.__main__ import main as export
from serving.bundle.decision import FEATURES
from serving.bundle.lessons import Teachable
from serving.bundle.model import BundleModel
from serving.bundle.pooled import ChoiceMemory, PooledSettings, Projection
from serving.bundle.pooled.factors import ClassFactors
from serving.quarantine.records import Arrival, Item
from serving.quarantine.store import Store
from tests.helpers import tiny_source
from training.discover import main
from training.measure.discovery import UnknownImage, discover, group, unknown_images

LABELS = ("zero", "one", "two", "three")


@pytest.fixture(scope="module")
def bundle(tiny_hat: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("discover")
    assert export([str(tiny_hat), "--out", str(folder / "bundle"), "--force"]) == 0
    return folder / "bundle"


@pytest.fixture(scope="module")
def model(bundle: Path) -> BundleModel:
    return BundleModel.load(bundle, provider="cpu")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store.open(f"sqlite:///{tmp_path}/quarantine.db")
    yield store
    store.close()


def png(seed: int) -> bytes:
    """Noise that differs in every image."""
    pixels = np.random.default_rng(seed).integers(0, 256, (8, 8), dtype=np.uint8)
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "PNG")
    return content.getvalue()


def arrival(
    seed: int, features: NDArray[np.float32], version: str = "v1", guess: str = "zero", confidence: float = 0.5
) -> Arrival:
    answer = {"best_guess": guess, "confidence": confidence}
    return Arrival(png(seed), "unknown", 1000.0 + seed, version, answer, features)


def clouds(model: BundleModel) -> NDArray[np.float32]:
    """Features of 25 + 15 images in two clusters and of 3 outliers."""
    size = model.run(model.bundle.golden.pixels[:1], features=True)[FEATURES].shape[1]
    generator = np.random.default_rng(0)
    middles = np.repeat(np.eye(2, size) * 20, (25, 15), axis=0)
    rest = generator.normal(size=(3, size)) * 50
    return np.concatenate([middles + generator.normal(size=(40, size)), rest]).astype(np.float32)


def address(tmp_path: Path) -> list[str]:
    return ["--quarantine", f"sqlite:///{tmp_path}/quarantine.db"]


def test_groups_are_found_stored_and_printed(
    store: Store, model: BundleModel, bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    version = model.manifest.version
    ids = store.add([arrival(n, row, version) for n, row in enumerate(clouds(model))]).kept
    assert main([*address(tmp_path), "--bundle", str(bundle), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["images"], found["new_classes"], found["known_by_now"]) == (43, 2, 0)
    written = store.groups()
    assert [len(store.items(group=one.id)) for one in written] == [one["size"] for one in found["groups"]]
    assert {item.id for item in store.items(group=written[0].id)} <= set(ids[:25])
    assert {item.id for item in store.items(group=written[1].id)} <= set(ids[25:40])
    assert found["in_no_group"] == 43 - sum(one["size"] for one in found["groups"]) >= 3
    assert main([*address(tmp_path), "--bundle", str(bundle)]) == 0
    table = capsys.readouterr().out
    assert "43 unknown images, about 2 new classes" in table
    assert "name the groups on the page /unknowns" in table


def test_only_unknowns_that_nobody_has_looked_at_are_grouped(store: Store, model: BundleModel, bundle: Path) -> None:
    arrivals = [arrival(n, row, model.manifest.version) for n, row in enumerate(clouds(model))]
    ids = store.add([*arrivals[:38], arrivals[38]._replace(kind="audit"), *arrivals[39:]]).kept
    store.mark_junk(ids[:10], "ann")
    assert discover(store, model, 10)["images"] == 32
    grouped = {item.id for one in store.groups() for item in store.items(group=one.id)}
    assert not grouped & {*ids[:10], ids[38]}


def test_images_of_another_version_are_shown_to_the_model(
    store: Store, model: BundleModel, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = np.zeros(3, np.float32)
    kept = arrival(0, np.ones(5, np.float32), model.manifest.version, "two", 0.9)
    older = [arrival(n, wrong, "older", "gone") for n in range(1, 30)]
    for place, pixels in enumerate(tiny_source().train.of(LABELS).pixels[::5]):
        # Images of classes that were learned in the meantime.
        content = io.BytesIO()
        Image.fromarray(pixels[:, :, 0]).save(content, "PNG")
        older[place] = older[place]._replace(content=content.getvalue())
    store.add([kept, *older])
    strict = replace(model, bundle=replace(model.bundle, rule=model.bundle.rule.model_copy(update={"alpha": 0.5})))
    with caplog.at_level("INFO"):
        seen = {one.item.id: one for one in unknown_images(store, store.items(), strict)}
    assert "29 images were answered by other versions" in caplog.text
    first, *others = store.items()
    assert (seen[first.id].best_guess, seen[first.id].confidence) == ("two", 0.9)
    assert seen[first.id].features.tolist() == [1.0] * 5
    shown = {item.id: np.asarray(Image.open(io.BytesIO(store.image(item.id))))[None, :, :, None] for item in others}
    unknown = {number: strict.predict(one) for number, one in shown.items()}
    # An image that the new model knows is no longer unknown.
    assert set(seen) == {first.id, *(number for number, verdict in unknown.items() if not verdict.known[0])}
    assert 1 < len(seen) < 30
    for number in set(seen) - {first.id}:
        outputs = model.run(shown[number], features=True)
        np.testing.assert_allclose(seen[number].features, outputs[FEATURES][0], rtol=1e-4, atol=1e-4)
        assert seen[number].best_guess == LABELS[unknown[number].class_id[0]]


def test_an_image_that_cannot_be_read_is_named_and_skipped(
    store: Store, model: BundleModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (number,) = store.add([arrival(0, np.zeros(3, np.float32), "older")]).kept
    (file,) = [path for path in (tmp_path / "images").rglob("*") if path.is_file()]
    file.write_bytes(b"damaged")
    assert unknown_images(store, store.items(), model) == []
    assert f"skipped image {number} of the quarantine" in caplog.text


def test_an_empty_quarantine_is_no_error(
    store: Store, bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*address(tmp_path), "--bundle", str(bundle)]) == 0
    assert "nothing to group: the quarantine has no new unknown image" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--quarantine", "sqlite:////nowhere/q.db"], "quarantine sqlite:////nowhere/q.db: no such file"),
        (["--quarantine", "nonsense"], "quarantine: not a URL; allowed: such as sqlite:///"),
        ([], "no quarantine: give its URL with --quarantine"),
        (["--min-size", "1"], "--min-size is 1; allowed: 2 or more"),
    ],
)
def test_images_that_cannot_be_grouped_are_an_error_message(
    arguments: list[str], message: str, bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--bundle", str(bundle)]) == 2
    assert message in capsys.readouterr().err


def test_a_missing_bundle_is_an_error_message(store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*address(tmp_path), "--bundle", str(tmp_path / "nothing")]) == 2
    assert "no such bundle directory" in capsys.readouterr().err


# ---- new, or known and changed


def seen_as(guesses: list[str], confidence: float, item: Item) -> list[UnknownImage]:
    generator = np.random.default_rng(0)
    return [
        UnknownImage(replace(item, id=n), generator.normal(size=12).astype(np.float32), guess, confidence)
        for n, guess in enumerate(guesses)
    ]


@pytest.mark.parametrize(
    ("share", "confidence", "near", "shifted"),
    [(0.9, 0.8, "zero", True), (0.9, 0.7, "zero", False), (0.7, 0.9, "zero", False), (0.4, 0.9, None, False)],
)
def test_a_group_that_is_surely_taken_for_one_class_is_that_class_changed(
    share: float, confidence: float, near: str | None, shifted: bool, store: Store
) -> None:
    store.add([arrival(0, np.zeros(3, np.float32))])
    zeros = round(share * 40)
    others = ["one", "two", "three"] * 14
    (found,) = group(seen_as(["zero"] * zeros + others[: 40 - zeros], confidence, store.items()[0]), 10)
    assert (found.near_class, found.shifted) == (near, shifted)
    assert 0 <= found.cohesion <= 1


def test_new_groups_come_before_changed_ones_and_large_before_small(store: Store, model: BundleModel) -> None:
    store.add([arrival(0, np.zeros(3, np.float32))])
    (item,) = store.items()
    generator = np.random.default_rng(0)
    sizes, middles = (30, 15, 40), np.eye(3, 12) * 20
    seen = [
        UnknownImage(
            replace(item, id=100 * kind + n),
            (middles[kind] + generator.normal(size=12)).astype(np.float32),
            "zero" if kind == 2 else ("one", "two")[n % 2],
            0.9,
        )
        for kind, size in enumerate(sizes)
        for n in range(size)
    ]
    found = group(seen, 10)
    assert [one.members[0] // 100 for one in found] == [0, 1, 2]
    assert [one.shifted for one in found] == [False, False, True]


def drawn(classes: range, images: int) -> NDArray[np.float32]:
    """Vectors of unit length: images of every class vary much in eight directions, in which classes do not differ."""
    generator = np.random.default_rng(classes.start)
    centers = np.sqrt(0.5) * np.eye(64)[[8 + number for number in classes for _ in range(images)]]
    common = np.zeros(centers.shape)
    common[:, :8] = generator.normal(size=(len(centers), 8))
    rows = centers + common + 0.05 * generator.normal(size=centers.shape)
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def test_known_classes_determine_which_differences_count(store: Store) -> None:
    factors = ClassFactors(Projection(64, 0)).with_classes(drawn(range(6), 30), np.repeat(range(6), 30))
    known = Teachable(factors, ChoiceMemory(), PooledSettings(shrinkage=0.1))
    store.add([arrival(0, np.zeros(3, np.float32))])
    (item,) = store.items()
    seen = [
        UnknownImage(replace(item, id=n), features, "one", 0.9) for n, features in enumerate(drawn(range(6, 9), 25))
    ]
    found = group(seen, 10, known)
    assert [{member // 25 for member in one.members} for one in sorted(found, key=lambda one: min(one.members))] == [
        {0},
        {1},
        {2},
    ]
    assert sum(len(one.members) for one in found) >= 60
    without = group(seen, 10)
    assert len(without) != 3 or any(len({member // 25 for member in one.members}) > 1 for one in without)
