"""Checks that stop a server before it opens its port."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from serving.bundle.atomic import locked
from serving.bundle.errors import BundleError
from serving.bundle.layout import MANIFEST
from serving.host import preflight
from serving.host.preflight import CANNOT_SERVE, check, check_in_child, first_bundle
from serving.settings import Settings
from serving.swap.agreement import WorkerGroup
from tests.helpers import raise_at_call


@pytest.mark.parametrize(("fatal", "reason"), [(signal.SIGKILL, "too little memory"), (signal.SIGTERM, "SIGTERM")])
def test_a_check_that_is_killed_prints_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], fatal: signal.Signals, reason: str
) -> None:
    def killed(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        return subprocess.CompletedProcess(command, -fatal)

    monkeypatch.setattr(preflight.subprocess, "run", killed)
    assert check_in_child(Path("some/bundle")) == 128 + fatal
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"error: some/bundle: killed by {fatal.name} while it was tested")
    assert reason in line


@pytest.mark.parametrize("damage", ["nested", "pipe", "device"])
def test_a_hostile_bundle_prints_one_line(
    bundle: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], damage: str
) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    (copy / MANIFEST).unlink()
    if damage == "nested":
        (copy / MANIFEST).write_bytes(b"[" * 100_000)
    elif damage == "pipe":
        os.mkfifo(copy / MANIFEST)
    else:
        (copy / MANIFEST).symlink_to("/dev/zero")
    assert check(Settings(), copy) == CANNOT_SERVE
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"error: {copy / MANIFEST}: cannot be read")


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_only_regular_files_are_copied(bundle: Path, tmp_path: Path, kind: str) -> None:
    """A server copies its bundle before it serves it, with what is not listed in the manifest."""
    copy = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    if kind == "pipe":
        os.mkfifo(copy / "more")
    else:
        (copy / "more").symlink_to("/dev/zero")
    with pytest.raises(BundleError, match="not a regular file"):
        WorkerGroup.create(tmp_path / "home").copy_bundle(copy)


def test_a_bundle_that_a_killed_export_moved_aside_is_served(bundle: Path, tmp_path: Path) -> None:
    """Also beside what a process is just writing, and not on a disk on which nothing can be put back."""
    older, writing = tmp_path / ".bundle.old.x7", tmp_path / ".bundle.writing.y8"
    older.mkdir()
    writing.mkdir()
    shutil.copytree(bundle, older / "bundle")
    settings = Settings(bundle=tmp_path / "bundle")
    with locked(older) as held:
        assert held
        assert not first_bundle(settings).exists()
    assert check(settings, first_bundle(settings)) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_a_bundle_that_cannot_be_put_back_is_reported(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(bundle, tmp_path / ".bundle.old.x7" / "bundle")
    raise_at_call(monkeypatch, os, "rename", 1)
    settings = Settings(bundle=tmp_path / "bundle")
    assert check(settings, first_bundle(settings)) == CANNOT_SERVE
    assert "no such bundle directory" in capfd.readouterr().err
