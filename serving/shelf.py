"""A folder of bundles, with links that say which one is served: `current`, and `previous` to go back to.

    SHELF/859549a0961c/          a bundle, never changed once it is here
    SHELF/1f0c3f9d77ab/
    SHELF/current  -> 1f0c3f9d77ab
    SHELF/previous -> 859549a0961c

Servers only read the links. A link is flipped in one step, so that a reader finds the old one or the new one.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from serving.layout import MANIFEST

CURRENT, PREVIOUS = "current", "previous"


class ShelfError(Exception):
    """What a shelf cannot do; the message says why."""


class Shelf:
    """The bundles in `folder`; whoever publishes and whoever rolls back do so one at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def current(self) -> Path | None:
        """The bundle that is to be served."""
        return self._target(CURRENT)

    def previous(self) -> Path | None:
        """The bundle that was served before."""
        return self._target(PREVIOUS)

    def point_at(self, name: str) -> None:
        """Let `name` be the current bundle, and the current one the previous."""
        if Path(name).name != name or name in (CURRENT, PREVIOUS):
            raise ShelfError(f"{self.folder}: {name!r} is no name of a bundle; allowed: a directory on the shelf")
        self._check(name)
        before = self._link(CURRENT)
        if before == name:
            return
        if before is not None:
            self._flip(PREVIOUS, before)
        self._flip(CURRENT, name)

    def roll_back(self) -> Path:
        """Let the current and the previous bundle change places; gives the one that is current then."""
        now, before = self._link(CURRENT), self._link(PREVIOUS)
        if now is None or before is None or now == before:
            raise ShelfError(f"{self.folder}: no previous bundle to roll back to; one is kept when a new one comes")
        self._check(before)
        self._flip(CURRENT, before)
        self._flip(PREVIOUS, now)
        return (self.folder / before).resolve()

    @property
    def writable(self) -> bool:
        """Whether this process may flip the links."""
        return os.access(self.folder, os.W_OK | os.X_OK)

    def _check(self, name: str) -> None:
        if not (self.folder / name / MANIFEST).is_file():
            raise ShelfError(f"{self.folder / name}: no bundle; a bundle has to be on the shelf before it is current")

    def _target(self, link: str) -> Path | None:
        name = self._link(link)
        return None if name is None else (self.folder / name).resolve()

    def _link(self, link: str) -> str | None:
        try:
            return os.readlink(self.folder / link)
        except OSError:
            return None

    def _flip(self, link: str, name: str) -> None:
        fresh = self.folder / f".{link}.{os.getpid()}.{os.urandom(4).hex()}"
        try:
            fresh.symlink_to(name)
            os.replace(fresh, self.folder / link)
        finally:
            with contextlib.suppress(OSError):
                fresh.unlink()
        _settle(self.folder)


def _settle(folder: Path) -> None:
    """Let a change of names survive a loss of power, on file systems that know how."""
    with contextlib.suppress(OSError):
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
