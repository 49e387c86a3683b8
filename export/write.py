"""A bundle directory appears whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from serving.bundle import MANIFEST


class WriteError(Exception):
    """A place where no bundle can be written; the message says why."""


def check_target(folder: Path) -> None:
    """Refuse to replace what is not a bundle."""
    if folder.exists() and not (folder / MANIFEST).is_file():
        raise WriteError(f"{folder} exists and is not a bundle: choose another --out or remove it")


def write_directory(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write the files beside the target, then move them into place; an older bundle there is replaced."""
    check_target(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # In the same parent, so that moving it is one rename and never a copy.
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        fresh.chmod(0o755)
        for name, content in files.items():
            with (fresh / name).open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        _move_into_place(fresh, folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _move_into_place(fresh: Path, folder: Path) -> None:
    if not folder.exists():
        os.rename(fresh, folder)
        return
    older = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old.", dir=folder.parent))
    try:
        os.rename(folder, older / folder.name)
        os.rename(fresh, folder)
    finally:
        if not folder.exists():
            os.rename(older / folder.name, folder)
        shutil.rmtree(older, ignore_errors=True)
