"""Where the images of a batch come from: a folder of image files, or rows of Parquet files; local, or URLs for fsspec.

The list of images is made once. A chunk is a part of it that one process can read by itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from serving.batch.entries import is_url
from serving.batch.errors import BatchError
from serving.batch.parquet import RowGroup
from serving.batch.plan import BatchPlan, SourceKind

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
PARQUET = ".parquet"


class Chunk(NamedTuple):
    """Images that one process answers together."""

    number: int
    first: int
    """The position of its first image among all images."""
    rows: int
    files: tuple[str, ...] = ()
    group: RowGroup | None = None


def find(source: str) -> tuple[SourceKind, Iterator[str]]:
    """The kind of a source, and the names of its files: image files below a folder, or full names of Parquet files."""
    if source.endswith(PARQUET) and not _is_folder(source):
        return "rows", iter([source])
    if not _is_folder(source):
        allowed = f"a folder of images, a {PARQUET} file, or a folder of those"
        raise BatchError(f"{source}: nothing to answer: got no folder; allowed: {allowed}")
    if any(True for _ in _walk(source, (PARQUET,))):
        return "rows", (f"{source}/{name}" for name in _walk(source, (PARQUET,)))
    return "files", _walk(source, SUFFIXES)


def chunks(plan: BatchPlan, items: Iterable[Any]) -> Iterator[Chunk]:
    """The chunks of a list, in order."""
    if plan.kind == "files":
        waiting, number = iter(items), 0
        while names := tuple(islice(waiting, plan.chunk)):
            yield Chunk(number, number * plan.chunk, len(names), names)
            number += 1
        return
    number = first = 0
    for file, groups in items:
        for group, rows in enumerate(groups):
            for start in range(0, rows, plan.chunk):
                size = min(plan.chunk, rows - start)
                yield Chunk(number, first, size, group=RowGroup(file, group, start))
                number, first = number + 1, first + size


def chunk_count(plan: BatchPlan, items: Iterable[Any]) -> int:
    """How many chunks there are; for a folder this needs no look at the list."""
    if plan.kind == "files":
        return -(-plan.images // plan.chunk)
    return sum(-(-rows // plan.chunk) for _, groups in items for rows in groups)


def first_file(source: str) -> str:
    """The Parquet file itself, or the first one in a folder."""
    return f"{source}/{next(_walk(source, (PARQUET,)))}" if _is_folder(source) else source


def _is_folder(source: str) -> bool:
    if not is_url(source):
        return Path(source).is_dir()
    import fsspec

    filesystem, path = fsspec.core.url_to_fs(source)
    return bool(filesystem.isdir(path))


def _walk(source: str, suffixes: tuple[str, ...]) -> Iterator[str]:
    """Names of files below a folder, relative to it and in order; only one folder's names are in memory at a time."""
    if not is_url(source):
        yield from _walk_local(source, "", suffixes)
        return
    import fsspec

    # Without its cache, which would hold the names of all folders.
    filesystem, path = fsspec.core.url_to_fs(source, use_listings_cache=False)
    yield from _walk_url(filesystem, path.rstrip("/"), "", suffixes)


def _walk_url(filesystem: Any, root: str, below: str, suffixes: tuple[str, ...]) -> Iterator[str]:
    folder = f"{root}/{below}".rstrip("/")
    found = ((each["name"].rstrip("/"), each["type"] == "directory") for each in filesystem.ls(folder, detail=True))
    # Some object stores list a folder as an entry of itself.
    entries = sorted((name.rpartition("/")[2], is_folder) for name, is_folder in found if name != folder)
    for name, is_folder in entries:
        if is_folder:
            yield from _walk_url(filesystem, root, f"{below}{name}/", suffixes)
        elif name.lower().endswith(suffixes):
            yield f"{below}{name}"


def _walk_local(folder: str, below: str, suffixes: tuple[str, ...]) -> Iterator[str]:
    with os.scandir(os.path.join(folder, below)) as found:
        entries = sorted((entry.name, entry.is_dir(follow_symlinks=False)) for entry in found)
    for name, is_folder in entries:
        if is_folder:
            yield from _walk_local(folder, os.path.join(below, name), suffixes)
        elif name.lower().endswith(suffixes):
            yield os.path.join(below, name)
