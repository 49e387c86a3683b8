"""`openworld learn-unknowns`: labelled images are learned, published, and marked as learned."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from export import exporter, loop
from export.__main__ import main as export
from serving.bundle.manifest import load_bundle
from serving.bundle.shelf import Shelf
from serving.quarantine.store import Store
from tests.helpers import assert_same_tensors, kill_at_save, run_tensors, use_tiny_preset
from tests.training.test_add_unknowns import named
from training import fit
from training.store.checkpoint import read_config


@pytest.fixture(autouse=True)
def tiny_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    use_tiny_preset(monkeypatch)


@pytest.fixture
def run(tiny_hat: Path, tmp_path: Path) -> Path:
    """A run of zero, one, two and three."""
    return Path(shutil.copytree(tiny_hat, tmp_path / "run"))


@pytest.fixture(scope="module")
def first_shelf(tiny_hat: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shelf") / "shelf"
    with pytest.MonkeyPatch.context() as patch:
        use_tiny_preset(patch)
        assert export([str(tiny_hat), "--publish", str(folder), "--force"]) == 0
    return folder


@pytest.fixture
def shelf(first_shelf: Path, tmp_path: Path) -> Path:
    """A shelf with the run as it is before it learns more."""
    return Path(shutil.copytree(first_shelf, tmp_path / "shelf", symlinks=True))


def learn_unknowns(run: Path, url: str, *more: str) -> int:
    """With --force, because a run of a few epochs does not work."""
    return loop.main(["--quarantine", url, str(run), "--force", *more])


def test_it_is_published_and_the_images_are_marked(run: Path, store: Store, url: str, shelf: Path) -> None:
    items = named(store, {"five": 20, "six": 22})
    before = Shelf(shelf).current()
    assert before is not None
    assert learn_unknowns(run, url, "--publish", str(shelf)) == 0
    current = Shelf(shelf).current()
    assert current is not None
    assert load_bundle(current).manifest.labels == ("zero", "one", "two", "three", "five", "six")
    assert Shelf(shelf).previous() == before
    learned = store.items(state="learned")
    assert [item.id for item in learned] == sorted(items["five"] + items["six"])
    assert {item.learned_in for item in learned} == {current.name}
    assert store.labelled() == {}


def test_the_version_is_that_of_the_own_bundle_even_if_another_publisher_is_faster(
    run: Path, store: Store, url: str, shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = exporter.put_on_shelf
    theirs = Shelf(shelf).current()
    assert theirs is not None

    def put_on_shelf(*arguments: Any) -> Path:
        place = real(*arguments)
        # Another publisher moves the link before this one has returned.
        Shelf(shelf).point_at(theirs.name)
        return place

    monkeypatch.setattr(exporter, "put_on_shelf", put_on_shelf)
    named(store, {"five": 20})
    assert learn_unknowns(run, url, "--publish", str(shelf)) == 0
    assert Shelf(shelf).current() == theirs
    (version,) = {item.learned_in for item in store.items(state="learned")}
    assert version is not None
    assert version != theirs.name
    assert "five" in load_bundle(shelf / version).manifest.labels


def test_what_was_learned_is_published_later_without_learning_it_again(
    run: Path, store: Store, url: str, shelf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named(store, {"five": 20, "six": 20})
    assert learn_unknowns(run, url) == 0
    assert f"next: openworld learn-unknowns {run} --quarantine {url} --publish SHELF" in capsys.readouterr().err
    weights = run_tensors(run)
    assert learn_unknowns(run, url, "--publish", str(shelf)) == 0
    assert_same_tensors(run_tensors(run), weights)
    assert len(read_config(run).tasks) == 3
    assert len(store.items(state="learned")) == 40


def test_a_stopped_run_is_resumed_and_published(
    run: Path, store: Store, url: str, shelf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named(store, {"five": 20})
    with pytest.MonkeyPatch.context() as patch:
        kill_at_save(patch, 1, written=True)
        assert learn_unknowns(run, url, "--publish", str(shelf)) == 130
    hint = f"openworld learn-unknowns {run} --resume --publish {shelf} --force"
    assert f"stopped; continue with: {hint}\n" in capsys.readouterr().err
    assert loop.main(hint.split()[2:]) == 0
    assert len(store.items(state="learned")) == 20


def test_a_refused_publication_is_passed_on_and_nothing_is_marked(
    store: Store, url: str, shelf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    assert fit.main(["--out", str(other), "--tasks", "three,two; one"]) == 0
    before = Shelf(shelf).current()
    named(store, {"five": 20, "six": 20})
    assert learn_unknowns(other, url, "--publish", str(shelf)) == 2
    assert "error: version" in capsys.readouterr().err
    assert Shelf(shelf).current() == before
    assert {item.state for item in store.items()} == {"named"}
