"""Storage of image files: a folder, or any file system that fsspec knows (s3://, gs://, az://, sftp:// ...).

A file is complete and on disk before its row is written. Its unique name is the SHA-256 of the content, the mark of the
quarantine and a random suffix. So two writers never write the same file, two quarantines may share a folder, and a file
with our mark that no row names can be removed safely.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC
from pathlib import Path
from typing import Any

from serving.bundle.atomic import replacing, sync
from serving.quarantine.records import DamagedItemError, StoreError, UnavailableError

_NAME = re.compile(r"[0-9a-f]{64}-[0-9a-f]{8}-[0-9a-f]{8}")


def open_image_store(place: str) -> ImageStore:
    """A folder, given as a path or as file://, or a URL that fsspec knows."""
    if place.startswith("file://"):
        return ImageFolder(Path(place.removeprefix("file://")))
    return RemoteImages(place) if "://" in place else ImageFolder(Path(place))


def new_name(digest: str, mark: str) -> str:
    """A file name for this SHA-256 in the quarantine with this mark."""
    return f"{digest}-{mark}-{secrets.token_hex(4)}"


def is_own_name(name: str, mark: str) -> bool:
    """Whether `new_name` makes such names for the quarantine with this mark."""
    return _NAME.fullmatch(name) is not None and name[65:73] == mark


def _has_mark(name: str, mark: str) -> bool:
    return is_own_name(name.removesuffix(".part"), mark)


def _checked(name: str) -> str:
    """The name of a file in the folder; a row that was changed from outside could name any other file."""
    if _NAME.fullmatch(name.removesuffix(".part")) is None:
        raise DamagedItemError(f"image file {name!r} is not named as a quarantine names its files")
    return name


def is_intact(name: str, content: bytes) -> bool:
    return name.partition("-")[0] == hashlib.sha256(content).hexdigest()


class ImageFolder:
    """Image files in a local folder. All methods raise an UnavailableError if the storage cannot be used."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()

    def write(self, files: Mapping[str, bytes]) -> None:
        """Write all files durably; after an error none of them is left."""
        paths = [self._root / _checked(name) for name in files]
        try:
            with _unavailable(self._root):
                self._root.mkdir(parents=True, exist_ok=True)
                # All are written before the first is flushed: flushing one file often flushes the others too.
                with contextlib.ExitStack() as stack:
                    for path, content in zip(paths, files.values(), strict=True):
                        stack.enter_context(replacing(path)).write_bytes(content)
                sync(self._root)
        except BaseException:
            for path in paths:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
            raise

    def read(self, name: str) -> bytes:
        with _unavailable(self._root), _not_missing(name):
            return (self._root / _checked(name)).read_bytes()

    def remove(self, names: Iterable[str]) -> None:
        """Remove files; missing ones are ignored."""
        with _unavailable(self._root):
            for name in names:
                (self._root / _checked(name)).unlink(missing_ok=True)

    def old(self, mark: str, seconds: float) -> Iterator[str]:
        """Names of a quarantine's files that are older than `seconds`."""
        latest = time.time() - seconds
        with _unavailable(self._root):
            for path in self._root.iterdir() if self._root.exists() else ():
                with contextlib.suppress(FileNotFoundError):
                    if _has_mark(path.name, mark) and path.stat().st_mtime < latest:
                        yield path.name


class RemoteImages:
    """The same through fsspec. A file is written before its row, so that no row names an incomplete file."""

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
        with _unavailable(self._url), _not_missing(name):
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
                    if _has_mark(name, mark) and _timestamp(self._system.modified(path)) < latest:
                        yield name

    def _path(self, name: str) -> str:
        return f"{self._root}/{_checked(name)}"


ImageStore = ImageFolder | RemoteImages


def _timestamp(moment: Any) -> float:
    """fsspec returns dates; those without a time zone are UTC."""
    return float((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp())


@contextlib.contextmanager
def _not_missing(name: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise DamagedItemError(f"image file {name} is missing: it was removed from outside") from None


@contextlib.contextmanager
def _unavailable(place: object) -> Iterator[None]:
    try:
        yield
    except StoreError:
        raise
    except Exception as error:
        # fsspec uses many libraries, each with its own exceptions.
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UnavailableError(f"images at {place} cannot be used: {reason}", part="images") from error
