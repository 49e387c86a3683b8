"""A release is built from the tree as it is, without uploading anything."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.helpers_checkout import copy_checkout
from tests.helpers_serving import write_bundle

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean checkout with a tiny bundle in the place of the demonstration's."""
    place = copy_checkout(tmp_path_factory.mktemp("release") / "openworld")
    write_bundle(place / "runs/demo/bundle")
    git(place, "init", "--quiet")
    git(place, "add", "--all")
    git(place, "-c", "user.name=tester", "-c", "user.email=tester@localhost", "commit", "--quiet", "-m", "all")
    return place


def git(place: Path, *arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=place, check=True, capture_output=True)


def release(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(place / ".ci/release.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_dry_run_builds_everything_and_its_checksums(checkout: Path, tmp_path: Path) -> None:
    done = release(checkout, "--dry-run", "--out", str(tmp_path / "dist"))
    assert done.returncode == 0, done.stdout + done.stderr
    names = {path.name for path in (tmp_path / "dist").iterdir()}
    wheel, client = (one(names, rf"{name}-[\d.]+-py3-none-any\.whl") for name in ("openworld", "openworld_client"))
    sources = [one(names, rf"{name}-[\d.]+\.tar\.gz") for name in ("openworld", "openworld_client")]
    assert any(name.endswith(".bento") for name in names)
    lines = (tmp_path / "dist/SHA256SUMS").read_text().splitlines()
    sums = {name: digest for digest, name in (line.split("  ") for line in lines)}
    assert {*sums} == names - {"SHA256SUMS"}
    for name, digest in sums.items():
        assert hashlib.sha256((tmp_path / "dist" / name).read_bytes()).hexdigest() == digest
    inside = zipfile.ZipFile(tmp_path / "dist" / wheel).namelist()
    assert {"serving/http/page/static/index.html", "training/show/page.html", "export/cli.py"} <= {*inside}
    assert not [name for name in inside if name.startswith(("tests/", "runs/"))]
    for source in sources:
        with tarfile.open(tmp_path / "dist" / source) as archive:
            assert any(name.endswith("/pyproject.toml") for name in archive.getnames())
    # The client is of the same version, and answers for it alone.
    assert client.split("-")[1] == wheel.split("-")[1]
    code = "import openworld_client; print(openworld_client.__version__, openworld_client.Client.__module__)"
    command = [
        sys.executable,
        "-I",
        "-c",
        f"import sys; sys.path.insert(0, {str(tmp_path / 'dist' / client)!r}); {code}",
    ]
    imported = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert imported.stdout == f"{client.split('-')[1]} openworld_client.client\n", imported.stderr


def one(names: Iterable[str], pattern: str) -> str:
    (found,) = [name for name in names if re.fullmatch(pattern, name)]
    return found


def test_make_notices_that_an_installation_failed(checkout: Path, tmp_path: Path) -> None:
    """Also where make does not know .SHELLFLAGS."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'ERROR: no such package'\nexit 1\n")
    python.chmod(0o755)
    words = ["make", ".venv/dev", f"PY={python}", ".SHELLFLAGS=-c", "-o", ".venv/train"]
    done = subprocess.run(words, cwd=checkout, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "ERROR: no such package" in done.stdout
    assert not (checkout / ".venv/dev").exists()


def test_make_builds_a_dry_run_in_the_given_folder(checkout: Path, tmp_path: Path) -> None:
    """The target itself, without the installation that it depends on."""
    words = ["make", "release", "DRY=1", f"DIST={tmp_path}/dist", f"PY={sys.executable}", "-o", ".venv/dev"]
    done = subprocess.run(words, cwd=checkout, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "dist/SHA256SUMS").stat().st_size > 0
    assert "a dry run: nothing to publish" in done.stdout


def test_a_tree_that_is_not_ready_is_not_released(checkout: Path, tmp_path: Path) -> None:
    (checkout / "left.txt").write_text("forgotten")
    try:
        done = release(checkout, "--out", str(tmp_path / "dist"))
    finally:
        (checkout / "left.txt").unlink()
    assert done.returncode == 1
    assert "not ready: the tree has 1 changes that are not committed, such as left.txt" in done.stdout
    assert not (tmp_path / "dist").exists()
