"""Writes a bundle directory, which appears complete or not at all."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from serving.bundle.atomic import sync
from serving.bundle.layout import MANIFEST


class WriteError(Exception):
    """A bundle cannot be written; the message says why."""


def check_target(folder: Path) -> None:
    """Refuse to replace anything but a bundle or an empty folder."""
    if folder.is_symlink():
        # Such as a shelf's `current`: a folder in its place could not be switched to another version.
        raise WriteError(
            f"{folder} is a link to {os.readlink(folder)}: give --out a folder of its own, or its shelf to --publish"
        )
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if folder.exists() and not (folder / MANIFEST).is_file():
        raise WriteError(f"{folder} exists and is not a bundle: choose another --out or remove it")


@contextmanager
def fresh_directory(parent: Path, name: str) -> Iterator[Path]:
    """A hidden folder to write in; it is removed when the block ends, unless it was moved."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        # In the same parent, so that moving it is a rename and never a copy.
        fresh = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=parent))
    except OSError as error:
        raise WriteError(f"{parent}: no bundle can be written there: {error.strerror}") from None
    try:
        fresh.chmod(0o755)
        yield fresh
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def move_into_place(fresh: Path, folder: Path) -> None:
    """Move a complete bundle to its place; an older bundle there is replaced."""
    check_target(folder)
    replace_directory(fresh, folder)


def replace_directory(fresh: Path, folder: Path) -> None:
    """Sync a folder and its files to disk, then move it to its place; if that fails, an older folder there is kept."""
    for path in (*fresh.iterdir(), fresh):
        sync(path)
    if folder.exists():
        _replace(fresh, folder)
    else:
        os.rename(fresh, folder)
    # Until the parent is synced, a crash may undo the rename.
    sync(folder.parent)


def _replace(fresh: Path, folder: Path) -> None:
    older = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old.", dir=folder.parent))
    try:
        os.rename(folder, older / folder.name)
        os.rename(fresh, folder)
    finally:
        if not folder.exists():
            os.rename(older / folder.name, folder)
        shutil.rmtree(older, ignore_errors=True)
