"""Run, bundle and shelf directories on file systems that are full or read-only: an error message and no residue."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from export.__main__ import main as export
from serving.bundle.manifest import load_bundle
from serving.bundle.model import BundleModel
from serving.bundle.shelf import Shelf
from serving.teaching.curriculum import Curriculum, Examples
from serving.teaching.errors import TeachError
from serving.teaching.learning import learn
from serving.teaching.writing import compose, put_beside
from tests.helpers import HELD_OUT, assert_same_tensors, call_at_save, run_tensors, use_tiny_preset
from tests.helpers_teaching import encode, pictures, write_bundle
from training import fit


def _mount(*arguments: str) -> bool:
    return subprocess.run(["mount", *arguments], check=False, capture_output=True).returncode == 0


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    if os.geteuid() != 0 or not _mount("-t", "tmpfs", "-o", "size=16m", "openworld-test", str(place)):
        pytest.skip("only root may make a file system for a test")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def read_only(place: Path) -> None:
    assert _mount("-o", "remount,ro", str(place))


def writable(place: Path) -> None:
    assert _mount("-o", "remount,rw", str(place))
    (place / "filler").unlink(missing_ok=True)


def full(place: Path) -> None:
    """Leave no byte: what needs a few blocks fails half way."""
    with (place / "filler").open("wb", buffering=0) as filler:
        for size in (1 << 20, 4096, 1):
            try:
                while filler.write(b"\0" * size):
                    pass
            except OSError:
                continue


BROKEN = {"read-only": read_only, "full": full}
REASONS = {"read-only": "Read-only file system", "full": "No space left on device"}


@pytest.mark.parametrize("how", BROKEN)
def test_a_bundle_that_cannot_be_written_leaves_the_old_one(
    how: str, small: Path, tiny_hat: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_tiny_preset(monkeypatch)
    command = [str(tiny_hat), "--out", str(small / "bundle"), "--force"]
    assert export(command) == 0
    before = load_bundle(small / "bundle").manifest.version
    BROKEN[how](small)
    capsys.readouterr()
    assert export(command) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert REASONS[how] in line
    assert str(small) in line
    bundle = load_bundle(small / "bundle")
    bundle.check()
    assert bundle.manifest.version == before
    writable(small)
    assert {path.name for path in small.iterdir()} == {"bundle"}
    assert export(command) == 0


@pytest.mark.parametrize("how", BROKEN)
def test_a_shelf_that_cannot_be_written_offers_the_old_bundle(
    how: str,
    small: Path,
    tiny_hat: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_tiny_preset(monkeypatch)
    shelf, more = Shelf(small / "shelf"), tmp_path / "more"
    assert export([str(tiny_hat), "--publish", str(shelf.folder), "--force"]) == 0
    before = shelf.current()
    shutil.copytree(tiny_hat, more)
    assert fit.main(["--out", str(more), "--add-task", HELD_OUT]) == 0
    BROKEN[how](small)
    capsys.readouterr()
    assert export([str(more), "--publish", str(shelf.folder), "--force"]) == 2
    printed = capsys.readouterr().err.strip().splitlines()
    assert REASONS[how] in printed[-1]
    assert shelf.current() == before
    assert before is not None
    load_bundle(before).check()
    writable(small)
    assert export([str(more), "--publish", str(shelf.folder), "--force"]) == 0
    assert shelf.previous() == before


@pytest.mark.parametrize("how", BROKEN)
def test_a_run_that_cannot_be_written_prints_why_and_resumes(
    how: str, small: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_tiny_preset(monkeypatch)
    run = small / "run"
    BROKEN[how](small)
    assert fit.main(["--out", str(run)]) == 2
    assert REASONS[how] in capsys.readouterr().err.strip().splitlines()[-1]
    writable(small)
    assert fit.main(["--out", str(run), *(["--resume"] if (run / "config.json").exists() else [])]) == 0


def test_a_disk_that_is_full_half_way_through_a_run_costs_no_finished_epoch(
    small: Path, tiny_hat: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_tiny_preset(monkeypatch)
    run = small / "run"
    with pytest.MonkeyPatch.context() as patch:
        call_at_save(patch, 5, lambda: full(small))
        assert fit.main(["--out", str(run)]) == 2
    assert REASONS["full"] in capsys.readouterr().err.strip().splitlines()[-1]
    writable(small)
    assert fit.main(["--out", str(run), "--resume"]) == 0
    assert_same_tensors(run_tensors(run), run_tensors(tiny_hat))


@pytest.mark.parametrize("how", BROKEN)
def test_a_lesson_that_cannot_be_written_leaves_the_shelf_as_it_was(how: str, small: Path) -> None:
    shelf = small / "shelf"
    served = BundleModel.load(write_bundle(shelf / "first"), provider="cpu", threads=1)
    given = [(f"{number:064}", vector) for number, vector in enumerate(encode(pictures("elk", 4)))]
    examples = Examples.of({"elk": given}, "ann", "2024-01-01T00:00:00+00:00")
    written = compose(served, learn(Curriculum.of(served.bundle).taught(examples)), ())
    BROKEN[how](small)
    with pytest.raises(TeachError, match=f"be written.*: {REASONS[how]}"):
        put_beside(written, served.bundle, shelf)
    writable(small)
    assert [path.name for path in shelf.iterdir()] == ["first"]
    load_bundle(shelf / "first").check()
    assert "elk" in load_bundle(put_beside(written, served.bundle, shelf)).manifest.labels
