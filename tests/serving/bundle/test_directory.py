from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import signal
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

from serving.bundle import directory
from serving.bundle.atomic import exchange
from serving.bundle.directory import WriteError, check_target, fresh_directory, move_into_place, recover
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
    with pytest.raises(WriteError, match=f"{target} exists and is not a bundle: choose another folder or remove it"):
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
    with pytest.raises(WriteError, match=f"{tmp_path / 'current'} is a link to {target}: give a folder of its"):
        write_directory(tmp_path / "current", NEW)
    assert os.readlink(tmp_path / "current") == target
    assert contents(tmp_path / "bundle") == OLD


@pytest.fixture
def in_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system that cannot exchange two names."""
    monkeypatch.setattr("serving.bundle.directory.exchange", lambda *_: False)


@pytest.mark.usefixtures("in_two_steps")
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
    exchanging = lambda *places: [happened.append("rename"), exchange(*places)][1]  # noqa: E731
    monkeypatch.setattr("serving.bundle.directory.exchange", exchanging)
    monkeypatch.setattr(os, "fsync", lambda file: [happened.append(os.readlink(f"/proc/self/fd/{file}")), fsync(file)])
    write_directory(tmp_path / "bundle", NEW)
    assert happened[-2:] == ["rename", str(tmp_path)]


def test_a_place_where_nothing_can_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("years of work")
    with pytest.raises(WriteError, match=f"{tmp_path / 'file'}: no bundle can be written there: File exists"):
        write_directory(tmp_path / "file" / "bundle", NEW)
    with pytest.raises(WriteError, match="/proc: no bundle can be written there: "):
        write_directory(Path("/proc/bundle"), NEW)


def killed_while_writing(folder: Path, at: str) -> None:
    """Write a bundle in a child process that is killed before or after a call of this function."""
    when, _, name = at.partition(" ")
    if child := os.fork():
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        return
    places = {"rename": os, "exchange": directory, "rmtree": shutil}
    function = getattr(places[name], name)

    def killing(*given: object, **options: object) -> object:
        if when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        function(*given, **options)
        os.kill(os.getpid(), signal.SIGKILL)
        return None

    try:
        if name != "exchange":
            directory.exchange = lambda *_: False  # type: ignore[assignment]
        setattr(places[name], name, killing)
        write_directory(folder, NEW)
    finally:
        os._exit(1)


@pytest.mark.parametrize("at", ["before exchange", "after exchange", "before rename", "after rename", "before rmtree"])
def test_kill_9_leaves_a_bundle_and_the_next_export_nothing_else(at: str, tmp_path: Path) -> None:
    """With the exchange there is one at every moment; in two steps, the next export puts the older one back."""
    write_directory(tmp_path / "bundle", OLD)
    killed_while_writing(tmp_path / "bundle", at)
    assert any(path.name.startswith(".bundle.") for path in tmp_path.iterdir()), "it was killed half way"
    if "exchange" in at:
        assert contents(tmp_path / "bundle") == (NEW if at.startswith("after") else OLD)
    assert (tmp_path / "bundle").exists() == (at != "after rename")
    recover(tmp_path, "bundle")
    assert contents(tmp_path / "bundle") == (NEW if at in ("after exchange", "before rmtree") else OLD)
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_what_a_living_process_writes_is_left_alone(tmp_path: Path) -> None:
    with fresh_directory(tmp_path, "bundle") as fresh:
        recover(tmp_path, "bundle")
        assert fresh.is_dir()
        # A user's own hidden folder, and another bundle's.
        for name in (".bundle.backup", ".bundle2.writing.abcdefgh"):
            (tmp_path / name).mkdir()
        write_directory(tmp_path / "bundle", NEW)
        assert fresh.is_dir()
    assert {path.name for path in tmp_path.iterdir()} == {"bundle", ".bundle.backup", ".bundle2.writing.abcdefgh"}


def test_two_names_are_exchanged(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").write_text("file")
    if not exchange(tmp_path / "one", tmp_path / "two"):
        pytest.skip("the file system of the temporary folder cannot exchange names")
    assert (tmp_path / "one").is_file()
    assert (tmp_path / "two").is_dir()
    with pytest.raises(FileNotFoundError):
        exchange(tmp_path / "one", tmp_path / "three")


@pytest.mark.parametrize(
    ("code", "result"), [(0, True), (errno.ENOTSUP, False), (errno.EINVAL, False), (errno.ENOENT, FileNotFoundError)]
)
def test_a_system_without_renameat2_exchanges_by_renamex_np(
    monkeypatch: pytest.MonkeyPatch, code: int, result: object
) -> None:
    """With a stand-in for the library of macOS: which function is called, with what, and what its errors mean."""
    calls = []

    def renamex_np(*arguments: object) -> int:
        calls.append(arguments)
        ctypes.set_errno(code)
        return -1 if code else 0

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace(renamex_np=renamex_np))
    if isinstance(result, bool):
        assert exchange(Path("one"), Path("two")) is result
    else:
        with pytest.raises(FileNotFoundError):
            exchange(Path("one"), Path("two"))
    assert calls == [(b"one", b"two", 2)]


def test_a_system_without_either_function_exchanges_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace())
    assert not exchange(tmp_path / "one", tmp_path / "two")
