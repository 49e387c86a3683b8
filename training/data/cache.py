"""The cache of encoded images on disk: where it is, how large it may become, and how it is emptied.

It has one part per trunk and view with the vectors, and one part with the digests of files. A vector belongs to the
content of a file. Digests are only there to save reading files again that did not change. Beside them are graphs that
torch has exported (`models.trunks.stored_graphs`).
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.trunks import cache_settings
from models.trunks.cache_settings import FOLDER_VARIABLE, GB, LIMIT_VARIABLE, cache_folder
from models.trunks.stored_graphs import GRAPHS
from serving.bundle.atomic import replace_file
from training.data.images import DataError
from training.data.records import INDEX, KEY, Records

VECTORS, DIGESTS, ABOUT = "encoded", "digests", "about.json"
DIGESTS_SHARE = 0.05
"""The share of the allowed size at which the digests of files are forgotten."""


@dataclass(frozen=True)
class Part:
    """All vectors of one trunk and view, the digests of files, or the exported graphs."""

    folder: Path
    bytes: int
    used: float
    """When it was last used, in seconds since 1970."""

    def about(self) -> dict[str, Any]:
        """The trunk, size, dim and view of vectors; {} if that is not known."""
        try:
            found = json.loads((self.folder / ABOUT).read_bytes())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


class Cache:
    """The cache of one process. Parts that it uses stay open, so that another process can remove their files."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or cache_folder()
        self._open: dict[Path, Records] = {}

    def vectors(self, name: str, dim: int, about: Mapping[str, Any]) -> Records:
        """The part with this name, for float32 vectors with `dim` numbers."""
        folder = self.folder / VECTORS / name
        if folder not in self._open:
            records = self._records(folder, dim * np.dtype(np.float32).itemsize)
            try:
                replace_file(folder / ABOUT, json.dumps(about).encode(), durable=False)
            except OSError as error:
                raise self._unusable(error) from error
            return records
        return self._open[folder]

    def make_room(self, records: Records, count: int, *, restart: bool) -> bool:
        """Make sure that `count` more vectors fit, by removing the least recently used parts that are not in use here.

        If that is not enough and `restart` allows it, the part itself is removed; the result is whether it was. Raises
        a DataError if there is still no room.
        """
        own, needed, limit = records.folder, count * records.width, cache_limit()
        others = [part for part in parts(self.folder) if part.folder.name != DIGESTS]
        excess = sum(part.bytes for part in others) + needed - limit
        for part in others:
            if excess > 0 and part.folder not in self._open:
                # A process that still uses it keeps its open files.
                shutil.rmtree(part.folder, ignore_errors=True)
                excess -= part.bytes
        restarted = excess > 0 and restart and len(records) > 0
        if restarted:
            excess -= next((part.bytes for part in others if part.folder == own), 0)
            shutil.rmtree(own, ignore_errors=True)
            self._open.pop(own).close()
        free = shutil.disk_usage(_existing(self.folder)).free
        if excess > 0 or needed > free:
            where = f"{limit / GB:g} GB in all are allowed" if excess > 0 else f"{free / GB:.2f} GB are free"
            raise DataError(
                f"{count} more encoded images need {needed / GB:.2f} GB in {self.folder}, where {where}; allowed: "
                f"a larger {LIMIT_VARIABLE}, another folder in {FOLDER_VARIABLE}, or fewer images"
            )
        return restarted

    def append(self, records: Records, keys: Sequence[bytes], values: NDArray[Any]) -> None:
        try:
            records.append(keys, values)
        except OSError as error:
            raise self._unusable(error) from error

    def digests_of(self, stamps: Sequence[bytes | None]) -> list[bytes | None]:
        """The digest of the content of each file, if its stamp was noted."""
        records = self._digests()
        rows, known = records.find([stamp or b"" for stamp in stamps]), records.rows(np.uint8)
        return [known[row].tobytes() if row >= 0 else None for row in rows]

    def note_digests(self, found: Sequence[tuple[bytes | None, bytes]]) -> None:
        """Remember the digests of files by their stamps; None: there is no stamp."""
        stamped = [(stamp, digest) for stamp, digest in found if stamp is not None]
        if stamped:
            values = np.frombuffer(b"".join(digest for _, digest in stamped), np.uint8)
            self.append(self._digests(), [stamp for stamp, _ in stamped], values)

    def _digests(self) -> Records:
        folder = self.folder / DIGESTS
        if folder not in self._open:
            part = next((part for part in parts(self.folder) if part.folder == folder), None)
            if part is not None and part.bytes > DIGESTS_SHARE * cache_limit():
                shutil.rmtree(folder, ignore_errors=True)
        return self._records(folder, KEY)

    def _records(self, folder: Path, width: int) -> Records:
        if folder not in self._open:
            try:
                self._open[folder] = Records(folder, width)
            except OSError as error:
                raise self._unusable(error) from error
        return self._open[folder]

    def _unusable(self, error: OSError) -> DataError:
        return DataError(
            f"the cache {self.folder} cannot be used ({error.strerror}); "
            f"allowed: a writable folder with room, named by {FOLDER_VARIABLE}"
        )


def cache_limit() -> int:
    """The bytes that all vectors and graphs together may take; raises a DataError if the setting cannot be used."""
    try:
        return cache_settings.cache_limit()
    except ValueError as error:
        raise DataError(str(error)) from None


def parts(folder: Path) -> list[Part]:
    """The parts of the cache, least recently used first."""
    found = []
    for index in (*folder.glob(f"{VECTORS}/*/{INDEX}"), *folder.glob(f"{DIGESTS}/{INDEX}")):
        try:
            size = sum(file.stat().st_size for file in index.parent.iterdir())
            found.append(Part(index.parent, size, index.stat().st_mtime))
        except FileNotFoundError:
            continue  # another process has just removed it
    with contextlib.suppress(FileNotFoundError):
        graphs = [file.stat() for file in (folder / GRAPHS).iterdir()]
        if graphs:
            used = max(stat.st_mtime for stat in graphs)
            found.append(Part(folder / GRAPHS, sum(stat.st_size for stat in graphs), used))
    return sorted(found, key=lambda part: part.used)


def clear(folder: Path) -> int:
    """Remove the whole cache; returns its size in bytes."""
    size = sum(part.bytes for part in parts(folder))
    for name in (VECTORS, DIGESTS, GRAPHS):
        shutil.rmtree(folder / name, ignore_errors=True)
    return size


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(path for path in (folder, *folder.parents) if path.exists())
