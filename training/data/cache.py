"""The cache of encoded images: where it is, how large it may become, and how it is emptied."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from training.data.images import DataError

FOLDER_VARIABLE, LIMIT_VARIABLE = "OPENWORLD_CACHE", "OPENWORLD_CACHE_GB"
DEFAULT_GB = 20.0
GB = 1024**3
VECTORS, DIGESTS, ABOUT = "encoded", "digests", "about.json"


@dataclass(frozen=True)
class Part:
    """All vectors of one trunk and view, or the digests of files."""

    folder: Path
    bytes: int
    used: float
    """When it was last used, in seconds since 1970."""


def cache_folder() -> Path:
    """OPENWORLD_CACHE, else a folder in the user's cache folder."""
    if given := os.environ.get(FOLDER_VARIABLE):
        return Path(given).expanduser().resolve()
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "openworld"


def cache_limit() -> int:
    """The bytes that all vectors together may take: OPENWORLD_CACHE_GB, or 20 GB."""
    text = os.environ.get(LIMIT_VARIABLE) or str(DEFAULT_GB)
    try:
        limit = float(text)
    except ValueError:
        limit = 0.0
    if not limit > 0:
        raise DataError(f"{LIMIT_VARIABLE} is {text!r}; allowed: gigabytes above 0, such as {DEFAULT_GB:g}")
    return int(limit * GB)


def parts(folder: Path) -> list[Part]:
    """The parts of the cache, least recently used first."""
    found = []
    for index in (*folder.glob(f"{VECTORS}/*/index"), *folder.glob(f"{DIGESTS}/index")):
        size = sum(file.stat().st_size for file in index.parent.iterdir())
        found.append(Part(index.parent, size, index.stat().st_mtime))
    return sorted(found, key=lambda part: part.used)


def make_room(folder: Path, own: Path, needed: int) -> None:
    """Remove the least recently used vectors until `needed` more bytes fit into the part `own`.

    `own` is removed last, because it may hold vectors that are needed again.
    """
    limit = cache_limit()
    if needed > limit:
        raise DataError(
            f"the encoded images need {needed / GB:.2f} GB, but the cache {folder} may have {limit / GB:.2f} GB; "
            f"allowed: a larger {LIMIT_VARIABLE}, or fewer images"
        )
    vectors = [part for part in parts(folder) if part.folder.parent.name == VECTORS]
    excess = sum(part.bytes for part in vectors) + needed - limit
    for part in sorted(vectors, key=lambda part: part.folder == own):
        if excess <= 0:
            break
        # A process that still uses it keeps what it has mapped.
        shutil.rmtree(part.folder, ignore_errors=True)
        excess -= part.bytes
    free = shutil.disk_usage(existing(folder)).free
    if needed > free:
        raise DataError(
            f"the encoded images need {needed / GB:.2f} GB, but the disk of {folder} has {free / GB:.2f} GB left; "
            f"allowed: another folder in {FOLDER_VARIABLE}, or fewer images"
        )


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(path for path in (folder, *folder.parents) if path.exists())


def clear(folder: Path) -> int:
    """Remove the whole cache; returns its size in bytes."""
    size = sum(part.bytes for part in parts(folder))
    for name in (VECTORS, DIGESTS):
        shutil.rmtree(folder / name, ignore_errors=True)
    return size
