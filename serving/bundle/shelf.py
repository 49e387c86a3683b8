"""A folder of bundles, with links that name the one to serve (`current`) and the one before it (`previous`).

    SHELF/859549a0961c/          a bundle, never changed once it is here
    SHELF/1f0c3f9d77ab/
    SHELF/current  -> 1f0c3f9d77ab
    SHELF/previous -> 859549a0961c

Servers only read the links. A link is replaced atomically, so a reader finds the old target or the new one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import EllipsisType

from serving.bundle.atomic import locked, replacing, sync
from serving.bundle.layout import MANIFEST

CURRENT, PREVIOUS = "current", "previous"
PATIENCE = 10.0
"""Seconds to wait for another process that changes the links."""


class ShelfError(Exception):
    """A change of a shelf that is not possible; the message has the reason."""


class Shelf:
    """The bundles in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def current(self) -> Path | None:
        """The bundle to serve."""
        return self._target(CURRENT)

    def previous(self) -> Path | None:
        """The bundle that was current before."""
        return self._target(PREVIOUS)

    def point_at(self, name: str, instead_of: str | EllipsisType | None = ...) -> None:
        """Make `name` the current bundle, and the current bundle the previous one.

        `instead_of` is the bundle that the new one continues (None: there is none): a ShelfError if another process has
        published a different one since.
        """
        if Path(name).name != name or name in (CURRENT, PREVIOUS):
            raise ShelfError(
                f"{self.folder}: not the name of a bundle: got {name!r}; allowed: a directory on the shelf"
            )
        self._check(name)
        with self._changing():
            before = self._link(CURRENT)
            if before == name:
                return
            if not isinstance(instead_of, EllipsisType) and before != instead_of:
                raise ShelfError(
                    f"{self.folder}: {before} was published meanwhile, and the new bundle continues {instead_of}; "
                    "publish again"
                )
            if before is not None:
                self._set_link(PREVIOUS, before)
            self._set_link(CURRENT, name)

    def roll_back(self) -> Path:
        """Exchange the current and the previous bundle; returns the new current one."""
        with self._changing():
            now, before = self._link(CURRENT), self._link(PREVIOUS)
            if now is None or before is None or now == before:
                remedy = "there is one after a second bundle is published"
                raise ShelfError(f"{self.folder}: no previous bundle to roll back to; {remedy}")
            self._check(before)
            self._set_link(CURRENT, before)
            self._set_link(PREVIOUS, now)
            return (self.folder / before).resolve()

    @property
    def writable(self) -> bool:
        """Whether this process may change the links."""
        return os.access(self.folder, os.W_OK | os.X_OK)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Be the only process that changes the links, for the milliseconds that it takes."""
        with locked(self.folder, PATIENCE) as alone:
            if not alone:
                raise ShelfError(f"{self.folder}: another process has been changing it for {PATIENCE:g} seconds")
            yield

    def _check(self, name: str) -> None:
        if not (self.folder / name / MANIFEST).is_file():
            raise ShelfError(
                f"{self.folder / name}: no bundle; a bundle must be on the shelf before it can be made current"
            )

    def _target(self, link: str) -> Path | None:
        name = self._link(link)
        return None if name is None else (self.folder / name).resolve()

    def _link(self, link: str) -> str | None:
        try:
            return os.readlink(self.folder / link)
        except OSError:
            return None

    def _set_link(self, link: str, name: str) -> None:
        with replacing(self.folder / link, durable=False, shared=True) as temporary:
            temporary.symlink_to(name)
        # Some file systems cannot flush a folder.
        with contextlib.suppress(OSError):
            sync(self.folder)
