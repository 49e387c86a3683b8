from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from serving.bundle.atomic import locked
from serving.bundle.layout import MANIFEST
from serving.bundle.shelf import Shelf, ShelfError


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    """Three bundles, none of them current; how a bundle looks inside does not matter here."""
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / MANIFEST).write_text("{}")
    return Shelf(tmp_path)


def test_an_empty_shelf_has_neither(shelf: Shelf) -> None:
    assert (shelf.current(), shelf.previous()) == (None, None)
    with pytest.raises(ShelfError, match="no previous bundle"):
        shelf.roll_back()


def test_what_was_current_is_kept_as_previous(shelf: Shelf) -> None:
    shelf.point_at("a")
    assert (shelf.current(), shelf.previous()) == (shelf.folder / "a", None)
    shelf.point_at("b")
    shelf.point_at("c")
    assert (shelf.current(), shelf.previous()) == (shelf.folder / "c", shelf.folder / "b")
    # Publishing the same bundle again must not make it the previous bundle.
    shelf.point_at("c")
    assert shelf.previous() == shelf.folder / "b"


def test_rolling_back_twice_is_where_it_was(shelf: Shelf) -> None:
    shelf.point_at("a")
    shelf.point_at("b")
    assert shelf.roll_back() == shelf.current() == shelf.folder / "a"
    assert shelf.previous() == shelf.folder / "b"
    assert shelf.roll_back() == shelf.current() == shelf.folder / "b"


def test_links_are_relative_and_nothing_else_is_left(shelf: Shelf) -> None:
    shelf.point_at("a")
    shelf.point_at("b")
    assert (os.readlink(shelf.folder / "current"), os.readlink(shelf.folder / "previous")) == ("b", "a")
    assert sorted(path.name for path in shelf.folder.iterdir()) == ["a", "b", "c", "current", "previous"]


@pytest.mark.parametrize("name", ["d", "current", "previous", "..", ".", "", "a/", "../a", "/tmp"])
def test_only_a_bundle_on_the_shelf_can_be_current(shelf: Shelf, name: str) -> None:
    shelf.point_at("a")
    with pytest.raises(ShelfError, match="bundle"):
        shelf.point_at(name)
    assert (shelf.current(), shelf.previous()) == (shelf.folder / "a", None)


def test_a_previous_bundle_that_is_gone_is_not_gone_back_to(shelf: Shelf) -> None:
    shelf.point_at("a")
    shelf.point_at("b")
    (shelf.folder / "a" / MANIFEST).unlink()
    with pytest.raises(ShelfError, match="no bundle"):
        shelf.roll_back()
    assert shelf.current() == shelf.folder / "b"


def test_a_reader_never_finds_a_link_missing(shelf: Shelf) -> None:
    shelf.point_at("a")
    shelf.point_at("b")
    ended = threading.Event()
    missing = []

    def read() -> None:
        while not ended.is_set():
            missing.extend([1] if shelf.current() is None or shelf.previous() is None else [])

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(60):
        shelf.point_at("abc"[number % 3])
    ended.set()
    reader.join()
    assert missing == []


def test_a_bundle_that_continues_another_than_the_current_one_is_refused(tmp_path: Path) -> None:
    """Two publishers began with the same bundle; the second would make the first one's task unknown again."""
    for name in ("one", "two", "three"):
        (tmp_path / name).mkdir()
        (tmp_path / name / MANIFEST).write_text("{}")
    shelf = Shelf(tmp_path)
    shelf.point_at("one", None)
    shelf.point_at("two", "one")
    with pytest.raises(ShelfError, match="two was published meanwhile, and the new bundle continues one"):
        shelf.point_at("three", "one")
    with pytest.raises(ShelfError, match="continues None"):
        shelf.point_at("three", None)
    assert (shelf.current(), shelf.previous()) == (tmp_path / "two", tmp_path / "one")


def test_one_process_at_a_time_changes_a_shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / MANIFEST).write_text("{}")
    monkeypatch.setattr("serving.bundle.shelf.PATIENCE", 0.05)
    with locked(tmp_path) as alone:
        assert alone
        with pytest.raises(ShelfError, match="another process has been changing it"):
            Shelf(tmp_path).point_at("one")
    Shelf(tmp_path).point_at("one")
    assert Shelf(tmp_path).current() == tmp_path / "one"
