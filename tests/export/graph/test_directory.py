from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

import pytest

from export.graph.directory import WriteError, check_target, fresh_directory, move_into_place
from serving.bundle.layout import MANIFEST
from tests.helpers import raise_at_call

OLD = {MANIFEST: b"old manifest", "model.onnx": b"old graph", "only.old": b"?"}
NEW = {"model.onnx": b"new graph", MANIFEST: b"new manifest"}


def write_files(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).write_bytes(content)


def write_directory(folder: Path, files: dict[str, bytes]) -> None:
    """Write it as the exporter does."""
    check_target(folder)
    with fresh_directory(folder.parent, folder.name) as fresh:
        write_files(fresh, files)
        move_into_place(fresh, folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_new_bundle_appears_with_its_files_and_nothing_beside_it(tmp_path: Path) -> None:
    write_directory(tmp_path / "deep" / "bundle", NEW)
    assert contents(tmp_path / "deep" / "bundle") == NEW
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["bundle"]
    assert stat.S_IMODE((tmp_path / "deep" / "bundle").stat().st_mode) == 0o755


def test_what_fails_half_way_leaves_nothing(tmp_path: Path) -> None:
    with contextlib.suppress(ZeroDivisionError), fresh_directory(tmp_path, "bundle") as fresh:
        write_files(fresh, NEW)
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_an_older_bundle_is_replaced_whole(tmp_path: Path) -> None:
    write_directory(tmp_path / "bundle", OLD)
    write_directory(tmp_path / "bundle", NEW)
    assert contents(tmp_path / "bundle") == NEW
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


@pytest.mark.parametrize("place", ["folder", "file"])
def test_what_is_not_a_bundle_is_left_alone(place: str, tmp_path: Path) -> None:
    target = tmp_path / "thesis"
    if place == "folder":
        target.mkdir()
        (target / "chapter.tex").write_text("years of work")
    else:
        target.write_text("years of work")
    with pytest.raises(WriteError, match=f"{target} exists and is not a bundle: choose another --out or remove it"):
        write_directory(target, NEW)
    kept = target / "chapter.tex" if place == "folder" else target
    assert kept.read_text() == "years of work"
    assert [path.name for path in tmp_path.iterdir()] == ["thesis"]


def test_an_empty_folder_becomes_the_bundle(tmp_path: Path) -> None:
    (tmp_path / "bundle").mkdir()
    write_directory(tmp_path / "bundle", NEW)
    assert contents(tmp_path / "bundle") == NEW
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


@pytest.mark.parametrize("target", ["bundle", "gone"])
def test_a_link_is_not_replaced(target: str, tmp_path: Path) -> None:
    write_directory(tmp_path / "bundle", OLD)
    (tmp_path / "current").symlink_to(target)
    with pytest.raises(WriteError, match=f"{tmp_path / 'current'} is a link to {target}: give --out a folder of its"):
        write_directory(tmp_path / "current", NEW)
    assert os.readlink(tmp_path / "current") == target
    assert contents(tmp_path / "bundle") == OLD


@pytest.mark.parametrize(
    ("function", "call"), [("fsync", 1), ("fsync", 2), ("rename", 1), ("rename", 2)], ids=lambda value: str(value)
)
def test_dying_over_an_older_bundle_leaves_the_older_one(
    function: str, call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_directory(tmp_path / "bundle", OLD)
    with monkeypatch.context() as patch:
        raise_at_call(patch, os, function, call)
        with pytest.raises(OSError, match=f"{function} died"):
            write_directory(tmp_path / "bundle", NEW)
    assert contents(tmp_path / "bundle") == OLD
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


@pytest.mark.parametrize(("function", "call"), [("fsync", 1), ("fsync", 2), ("rename", 1)])
def test_dying_at_a_new_place_leaves_nothing(
    function: str, call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        raise_at_call(patch, os, function, call)
        with pytest.raises(OSError, match=f"{function} died"):
            write_directory(tmp_path / "bundle", NEW)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("older", [False, True])
def test_the_folder_around_a_bundle_is_made_lasting_after_the_move(
    older: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if older:
        write_directory(tmp_path / "bundle", OLD)
    happened: list[str] = []
    rename, fsync = os.rename, os.fsync
    monkeypatch.setattr(os, "rename", lambda *places: [happened.append("rename"), rename(*places)])
    monkeypatch.setattr(os, "fsync", lambda file: [happened.append(os.readlink(f"/proc/self/fd/{file}")), fsync(file)])
    write_directory(tmp_path / "bundle", NEW)
    assert happened[-2:] == ["rename", str(tmp_path)]


def test_a_place_where_nothing_can_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("years of work")
    with pytest.raises(WriteError, match=f"{tmp_path / 'file'}: no bundle can be written there: File exists"):
        write_directory(tmp_path / "file" / "bundle", NEW)
    with pytest.raises(WriteError, match="/proc: no bundle can be written there: "):
        write_directory(Path("/proc/bundle"), NEW)
