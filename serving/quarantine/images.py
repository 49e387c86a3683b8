"""Where image files lie: a folder, or any place that fsspec knows (s3://, gs://, az://, sftp:// ...).

A file is whole and on the disk before its row is written, and has a name of its own: the SHA-256 of its content, the
mark of its quarantine and a random end. So no two writers ever meet in a file, two quarantines may share a place, and
a file that bears our mark and that no row names may be removed without asking anyone.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC
from pathlib import Path
from typing import Any, Protocol

from serving.quarantine.records import StoreError, UnavailableError


class Images(Protocol):
    """All methods raise an UnavailableError where the place cannot be used."""

    def write(self, files: Mapping[str, bytes]) -> None:
        """All of them, durably; or none of them, and an error."""

    def read(self, name: str) -> bytes: ...

    def remove(self, names: Iterable[str]) -> None:
        """Those that are there."""

    def old(self, mark: str, seconds: float) -> Iterator[str]:
        """Names of a quarantine's files that were written longer ago than that."""


def images_at(place: str) -> Images:
    """A folder, given as a path or as file://, or a URL that fsspec knows."""
    if place.startswith("file://"):
        return Folder(Path(place.removeprefix("file://")))
    return Bucket(place) if "://" in place else Folder(Path(place))


def new_name(digest: str, mark: str) -> str:
    """For a file with that SHA-256, of the quarantine with that mark."""
    return f"{digest}-{mark}-{secrets.token_hex(4)}"


def _bears(name: str, mark: str) -> bool:
    return re.fullmatch(rf"[0-9a-f]{{64}}-{mark}-[0-9a-f]{{8}}(\.part)?", name) is not None


def is_whole(name: str, content: bytes) -> bool:
    return name.partition("-")[0] == hashlib.sha256(content).hexdigest()


class Folder:
    """On a file system: written under another name, flushed, renamed, and the renaming flushed."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()

    def write(self, files: Mapping[str, bytes]) -> None:
        paths = [self._root / name for name in files]
        try:
            with _unavailable(self._root):
                self._root.mkdir(parents=True, exist_ok=True)
                # First all, then flushed: to flush one file often takes the others along.
                for path, content in zip(paths, files.values(), strict=True):
                    _unfinished(path).write_bytes(content)
                for path in paths:
                    _flush(_unfinished(path))
                    os.rename(_unfinished(path), path)
                _flush(self._root)
        except BaseException:
            # On a full disk what was written so far is in the way.
            for path in paths:
                with contextlib.suppress(OSError):
                    _unfinished(path).unlink(missing_ok=True)
                    path.unlink(missing_ok=True)
            raise

    def read(self, name: str) -> bytes:
        with _unavailable(self._root), _not_gone(name):
            return (self._root / name).read_bytes()

    def remove(self, names: Iterable[str]) -> None:
        with _unavailable(self._root):
            for name in names:
                (self._root / name).unlink(missing_ok=True)

    def old(self, mark: str, seconds: float) -> Iterator[str]:
        latest = time.time() - seconds
        with _unavailable(self._root):
            for path in self._root.iterdir() if self._root.exists() else ():
                with contextlib.suppress(FileNotFoundError):
                    if _bears(path.name, mark) and path.stat().st_mtime < latest:
                        yield path.name


class Bucket:
    """Through fsspec. Object stores show a file only when all of it is there; elsewhere the row comes after it."""

    def __init__(self, url: str) -> None:
        try:
            from fsspec.core import url_to_fs

            self._system, root = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise StoreError(f"images cannot be kept at {url}: {error}") from error
        self._url, self._root = url, root.rstrip("/")

    def write(self, files: Mapping[str, bytes]) -> None:
        try:
            with _unavailable(self._url):
                self._system.makedirs(self._root, exist_ok=True)
                for name, content in files.items():
                    self._system.pipe_file(self._path(name), content)
        except BaseException:
            with contextlib.suppress(UnavailableError):
                self.remove(files)
            raise

    def read(self, name: str) -> bytes:
        with _unavailable(self._url), _not_gone(name):
            return bytes(self._system.cat_file(self._path(name)))

    def remove(self, names: Iterable[str]) -> None:
        with _unavailable(self._url):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    self._system.rm_file(self._path(name))

    def old(self, mark: str, seconds: float) -> Iterator[str]:
        latest = time.time() - seconds
        with _unavailable(self._url):
            found: list[str] = self._system.find(self._root, maxdepth=1)
            for path in found:
                name = path.rpartition("/")[2]
                with contextlib.suppress(FileNotFoundError):
                    if _bears(name, mark) and _timestamp(self._system.modified(path)) < latest:
                        yield name

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


def _timestamp(moment: Any) -> float:
    """fsspec gives dates, some of them without a time zone; those are UTC."""
    return float((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp())


def _unfinished(path: Path) -> Path:
    return path.with_name(f"{path.name}.part")


def _flush(path: Path) -> None:
    """Wait until a file, or what a folder lists, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _not_gone(name: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise StoreError(f"image file {name} is gone: somebody else removed it") from None


@contextlib.contextmanager
def _unavailable(place: object) -> Iterator[None]:
    try:
        yield
    except StoreError:
        raise
    except Exception as error:
        # Behind fsspec lie many libraries, each with errors of its own.
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UnavailableError(f"images at {place} cannot be used: {reason}", part="images") from error
