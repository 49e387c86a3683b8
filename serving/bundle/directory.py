"""Writes a bundle directory, which appears complete or not at all."""

import contextlib
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from serving.bundle.atomic import exchange, lock_now, locked, sync
from serving.bundle.layout import MANIFEST

_FRESH, _OLDER = "writing", "old"
"""Parts of the names of hidden folders: a bundle that is being written, and one that is being replaced."""


class WriteError(Exception):
    """A bundle cannot be written; the message has the reason."""


def check_target(folder: Path) -> None:
    """Refuse to replace anything but a bundle or an empty folder."""
    if folder.is_symlink():
        # Such as a shelf's `current`: a folder in its place could not be switched to another version.
        raise WriteError(
            f"{folder} is a link to {os.readlink(folder)}: give a folder of its own, or its shelf to --publish"
        )
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if folder.exists() and not (folder / MANIFEST).is_file():
        raise WriteError(f"{folder} exists and is not a bundle: choose another folder or remove it")


@contextmanager
def fresh_directory(parent: Path, name: str) -> Iterator[Path]:
    """A hidden folder to write in; it is removed when the block ends, unless it was moved.

    Folders that killed processes have left are removed before, and a bundle that one of them had moved aside is put
    back.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        recover(parent, name)
        # In the same parent, so that moving it is a rename and never a copy.
        fresh, lock = _locked_directory(parent, f".{name}.{_FRESH}.")
    except OSError as error:
        raise WriteError(f"{parent}: no bundle can be written there: {error.strerror}") from None
    try:
        fresh.chmod(0o755)
        yield fresh
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        os.close(lock)


def recover(parent: Path, name: str) -> None:
    """Put back a bundle that a killed process had moved aside, and remove what such processes have left."""
    for kind in (_OLDER, _FRESH):
        for left in parent.glob(f".{glob.escape(name)}.{kind}.*"):
            # A process that lives holds the lock of its folder.
            with contextlib.suppress(FileNotFoundError), locked(left) as abandoned:
                if not abandoned:
                    continue
                if kind == _OLDER and not (parent / name).exists() and (left / name).exists():
                    os.rename(left / name, parent / name)
                shutil.rmtree(left, ignore_errors=True)


def recover_missing(folder: Path) -> None:
    """Put a bundle back that is not there because the process that replaced it was killed; does nothing otherwise."""
    if not os.path.lexists(folder):
        # If nothing can be written here, reading the bundle reports that it is missing.
        with contextlib.suppress(OSError):
            recover(folder.absolute().parent, folder.name)


def _locked_directory(parent: Path, prefix: str) -> tuple[Path, int]:
    """A new folder and the descriptor that holds its lock."""
    while True:
        made = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        # Another process may take it for a left one until it is locked, and remove it.
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(made, os.O_RDONLY | os.O_CLOEXEC)
            if lock_now(descriptor) and made.exists():
                return made, descriptor
            os.close(descriptor)


def move_into_place(fresh: Path, folder: Path) -> None:
    """Move a complete bundle to its place; an older bundle there is replaced."""
    check_target(folder)
    replace_directory(fresh, folder)


def replace_directory(fresh: Path, folder: Path) -> None:
    """Sync a folder and its files to disk, then move it to its place; if that fails, an older folder there is kept."""
    for path in (*fresh.iterdir(), fresh):
        sync(path)
    if not folder.exists():
        os.rename(fresh, folder)
    elif not exchange(fresh, folder):
        _replace(fresh, folder)
    # Until the parent is synced, a crash may undo the rename.
    sync(folder.parent)


def _replace(fresh: Path, folder: Path) -> None:
    """In two steps. A process that is killed between them leaves no bundle there, which `recover` puts back."""
    older, lock = _locked_directory(folder.parent, f".{folder.name}.{_OLDER}.")
    try:
        os.rename(folder, older / folder.name)
        os.rename(fresh, folder)
    finally:
        if not folder.exists():
            os.rename(older / folder.name, folder)
        shutil.rmtree(older, ignore_errors=True)
        os.close(lock)
