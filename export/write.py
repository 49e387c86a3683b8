"""A bundle directory appears whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from serving.layout import MANIFEST


class WriteError(Exception):
    """A place where no bundle can be written; the message says why."""


def check_target(folder: Path) -> None:
    """Refuse to replace what is not a bundle; an empty folder is one to be."""
    if folder.is_symlink():
        # Such as a shelf's `current`: a folder in its place would never be flipped again.
        raise WriteError(
            f"{folder} is a link to {os.readlink(folder)}: give --out a folder of its own, or its shelf to --publish"
        )
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if folder.exists() and not (folder / MANIFEST).is_file():
        raise WriteError(f"{folder} exists and is not a bundle: choose another --out or remove it")


@contextmanager
def fresh_directory(parent: Path, name: str) -> Iterator[Path]:
    """A hidden folder to write in; what is still there when the block ends is removed."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        # In the same parent, so that moving it is one rename and never a copy.
        fresh = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=parent))
    except OSError as error:
        raise WriteError(f"{parent}: no bundle can be written there: {error.strerror}") from None
    try:
        fresh.chmod(0o755)
        yield fresh
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).write_bytes(content)


def move_into_place(fresh: Path, folder: Path) -> None:
    """Make a folder with all its files lasting, then put it where it belongs; an older bundle there is replaced."""
    check_target(folder)
    for path in (*fresh.iterdir(), fresh):
        _sync(path)
    if folder.exists():
        _replace(fresh, folder)
    else:
        os.rename(fresh, folder)
    # Until its parent is written, a crash may undo the rename.
    _sync(folder.parent)


def _replace(fresh: Path, folder: Path) -> None:
    older = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old.", dir=folder.parent))
    try:
        os.rename(folder, older / folder.name)
        os.rename(fresh, folder)
    finally:
        if not folder.exists():
            os.rename(older / folder.name, folder)
        shutil.rmtree(older, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
