"""Where the images of a batch come from: a folder of image files, or rows of Parquet files; local, or URLs for fsspec.

The list of images is made once. A chunk is a part of it that one process can read by itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from serving.batch.errors import BatchError
from serving.batch.plan import BatchPlan, SourceKind
from serving.bundle.pixels import LIMITS

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
PARQUET = ".parquet"
READ_ROWS = 64
"""Rows of a Parquet file that are in memory at a time."""


class RowGroup(NamedTuple):
    """Consecutive rows of a row group of a Parquet file."""

    file: str
    group: int
    start: int


class Chunk(NamedTuple):
    """Images that one process answers together."""

    number: int
    first: int
    """The position of its first image among all images."""
    rows: int
    files: tuple[str, ...] = ()
    group: RowGroup | None = None


class Entry(NamedTuple):
    """One image: its bytes, or why they could not be read."""

    name: str
    content: bytes | OSError


def is_url(source: str) -> bool:
    return "://" in source


def absolute(source: str) -> str:
    return source if is_url(source) else os.path.abspath(source)


def find(source: str) -> tuple[SourceKind, Iterator[Any]]:
    """The kind of a source, and its list: names of image files, or `[Parquet file, rows of each row group]`."""
    if source.endswith(PARQUET) and not _is_folder(source):
        return "rows", _row_groups([source])
    if not _is_folder(source):
        allowed = f"a folder of images, a {PARQUET} file, or a folder of those"
        raise BatchError(f"{source}: nothing to answer: got no folder; allowed: {allowed}")
    if any(True for _ in _walk(source, (PARQUET,))):
        return "rows", _row_groups(f"{source}/{name}" for name in _walk(source, (PARQUET,)))
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


def read_file(path: str) -> bytes:
    """The bytes of a file or URL, at most one more than allowed: that is enough to refuse it for its size."""
    if is_url(path):
        import fsspec

        with fsspec.open(path, "rb") as file:
            content: bytes = file.read(LIMITS.size + 1)
            return content
    with open(path, "rb") as local:
        return local.read(LIMITS.size + 1)


def read_entry(path: str, name: str) -> Entry:
    try:
        return Entry(name, read_file(path))
    except (OSError, ValueError, ImportError) as error:
        return Entry(name, error if isinstance(error, OSError) else OSError(str(error)))


class RowReader:
    """Reads rows of Parquet files, forward: the next chunk of the same row group continues where the last one ended."""

    def __init__(self, column: str, keep: tuple[str, ...]) -> None:
        self._columns = [column, *keep]
        self._place: tuple[str, int] | None = None
        self._next = 0
        self._rows: Iterator[pa.RecordBatch] = iter(())
        self._left: pa.RecordBatch | None = None

    def read(self, group: RowGroup, rows: int) -> Iterator[pa.RecordBatch]:
        """The rows from `group.start` on, a few at a time."""
        if self._place != (group.file, group.group) or self._next > group.start:
            self._open(group)
        while rows:
            batch = self._left if self._left is not None else next(self._rows)
            skipped = min(group.start - self._next, len(batch)) if self._next < group.start else 0
            taken = min(len(batch) - skipped, rows)
            rest = batch.slice(skipped + taken)
            self._left = rest if len(rest) else None
            self._next += skipped + taken
            rows -= taken
            if taken:
                yield batch.slice(skipped, taken)

    def _open(self, group: RowGroup) -> None:
        source = _opened(group.file)
        # Buffered: a column of images is not read as a whole.
        file = pq.ParquetFile(source, buffer_size=1 << 20, pre_buffer=False)
        self._rows = file.iter_batches(READ_ROWS, row_groups=[group.group], columns=self._columns)
        self._place, self._next, self._left = (group.file, group.group), 0, None


def row_entries(batch: pa.RecordBatch, column: str, file: str) -> Iterator[Entry]:
    """The images in one column: bytes, paths, or structs of `bytes` and `path`, as data sets of Hugging Face have."""
    folder = file.rpartition("/")[0]
    for value in batch.column(column).to_pylist():
        name, content = "", value
        if isinstance(value, dict):
            name, content = value.get("path") or "", value.get("bytes")
            content = content if content is not None else name or None
        if isinstance(content, bytes):
            yield Entry(name, content)
        elif isinstance(content, str):
            where = content if is_url(content) or os.path.isabs(content) else f"{folder}/{content}"
            yield read_entry(where, content)
        else:
            yield Entry(name, OSError("no image in this row"))


def schema_of(source: str) -> pa.Schema:
    """The columns of a Parquet file, or of the first one in a folder."""
    first = source if not _is_folder(source) else next(_walk(source, (PARQUET,)))
    try:
        return pq.read_schema(_opened(first if first == source else f"{source}/{first}"))
    except (OSError, pa.ArrowInvalid) as error:
        raise BatchError(f"{first}: not a Parquet file that can be read: {error}") from error


def check_columns(source: str, column: str, keep: tuple[str, ...]) -> None:
    """Raise a BatchError unless the columns exist and the first one can have images."""
    schema = schema_of(source)
    for name in (column, *keep):
        if name not in schema.names:
            raise BatchError(f"{source}: no such column: got {name!r}; allowed: {', '.join(schema.names)}")
    kind = schema.field(column).type
    types = pa.types
    fits = types.is_binary(kind) or types.is_large_binary(kind) or types.is_string(kind) or types.is_large_string(kind)
    if not fits and not (types.is_struct(kind) and kind.get_field_index("bytes") >= 0):
        allowed = "bytes, paths, or structs of bytes and path"
        raise BatchError(f"{source}: column {column!r} has no images: got {kind}; allowed: {allowed}")


def _row_groups(files: Iterable[str]) -> Iterator[list[Any]]:
    for file in files:
        try:
            metadata = pq.read_metadata(_opened(file))
        except (OSError, pa.ArrowInvalid) as error:
            raise BatchError(f"{file}: not a Parquet file that can be read: {error}") from error
        yield [file, [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]]


def _opened(file: str) -> Any:
    if not is_url(file):
        return file
    import fsspec

    return fsspec.open(file, "rb").open()


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
