"""Images in the rows of Parquet files. A page that is damaged, or a file that is gone, makes errors of its rows."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from serving.batch.entries import Entry, is_url, read_entry
from serving.batch.errors import BatchError

READ_ROWS = 64
"""Rows that are in memory at a time."""


class RowGroup(NamedTuple):
    """Consecutive rows of a row group of a Parquet file."""

    file: str
    group: int
    start: int


class KeptColumns:
    """The columns that are copied, with types that the values of all files fit into."""

    def __init__(self, schema: pa.Schema | None = None) -> None:
        self.schema = schema if schema is not None else pa.schema([])

    @classmethod
    def decode(cls, text: str) -> KeptColumns:
        return cls(pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text))) if text else None)

    def encode(self) -> str:
        return base64.b64encode(self.schema.serialize()).decode() if len(self.schema) else ""

    def widen(self, file: str, names: tuple[str, ...], found: pa.Schema) -> None:
        """Make room for the values of another file; a BatchError if no type has room for both."""
        own = pa.schema([(name, found.field(name).type) for name in names if name in found.names])
        try:
            both = pa.unify_schemas([self.schema, own], promote_options="permissive")
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            allowed = "columns that have types with room for both, or no --keep"
            raise BatchError(f"{file}: copied columns differ between files: got {error}; allowed: {allowed}") from error
        self.schema = pa.schema([both.field(name) for name in names if name in both.names])

    def of(self, batch: pa.RecordBatch) -> pa.Table:
        """These columns of some rows; null where the file has no such column."""
        columns = [
            batch.column(field.name).cast(field.type)
            if field.name in batch.schema.names
            else pa.nulls(len(batch), field.type)
            for field in self.schema
        ]
        return pa.table(columns, self.schema)

    def nulls(self, rows: int) -> pa.Table:
        return pa.table([pa.nulls(rows, field.type) for field in self.schema], self.schema)


class RowReader:
    """Reads rows of Parquet files, forward: the next chunk of the same row group continues where the last one ended."""

    def __init__(self, column: str, keep: tuple[str, ...]) -> None:
        self._columns = [column, *keep]
        self._place: tuple[str, int] | None = None
        self._next = 0
        self._rows: Iterator[pa.RecordBatch] = iter(())
        self._left: pa.RecordBatch | None = None

    def read(self, group: RowGroup, rows: int) -> Iterator[pa.RecordBatch]:
        """The rows from `group.start` on, a few at a time; raises what the file, the format or the storage raises."""
        if self._place != (group.file, group.group) or self._next > group.start:
            self._open(group)
        # Only a reader that has succeeded goes on from here.
        place, self._place = self._place, None
        while rows:
            batch = self._left if self._left is not None else next(self._rows, None)
            if batch is None:
                raise OSError("fewer rows than when the run began")
            skipped = min(group.start - self._next, len(batch)) if self._next < group.start else 0
            taken = min(len(batch) - skipped, rows)
            rest = batch.slice(skipped + taken)
            self._left = rest if len(rest) else None
            self._next += skipped + taken
            rows -= taken
            if taken:
                yield batch.slice(skipped, taken)
        self._place = place

    def _open(self, group: RowGroup) -> None:
        source = opened(group.file)
        # Buffered: a column of images is not read as a whole.
        file = pq.ParquetFile(source, buffer_size=1 << 20, pre_buffer=False)
        self._rows = file.iter_batches(READ_ROWS, row_groups=[group.group], columns=self._columns)
        self._place, self._next, self._left = (group.file, group.group), 0, None


def row_entries(batch: pa.RecordBatch, column: str, file: str) -> Iterator[Entry]:
    """The images in one column: bytes, paths, or structs of `bytes` and `path`, as data sets of Hugging Face have."""
    folder = file.rpartition("/")[0]
    if column not in batch.schema.names:
        yield from (Entry("", OSError(f"no column {column!r}")) for _ in range(len(batch)))
        return
    for scalar in batch.column(column):
        try:
            value = scalar.as_py()
        except ValueError as error:
            value = OSError(str(error))
        name, content = "", value
        if isinstance(value, dict):
            name, content = value.get("path") or "", value.get("bytes")
            content = content if content is not None else name or None
        if isinstance(content, bytes | OSError):
            yield Entry(name, content)
        elif isinstance(content, str):
            where = content if is_url(content) or os.path.isabs(content) else f"{folder}/{content}"
            yield read_entry(where, content)
        else:
            yield Entry(name, OSError("no image in this row"))


def check_columns(file: str, column: str, keep: tuple[str, ...]) -> None:
    """Raise a BatchError unless the columns exist in a file and the first one can have images."""
    schema = _metadata(file).schema.to_arrow_schema()
    for name in (column, *keep):
        if name not in schema.names:
            raise BatchError(f"{file}: no such column: got {name!r}; allowed: {', '.join(schema.names)}")
    kind = schema.field(column).type
    types = pa.types
    fits = types.is_binary(kind) or types.is_large_binary(kind) or types.is_string(kind) or types.is_large_string(kind)
    if not fits and not (types.is_struct(kind) and kind.get_field_index("bytes") >= 0):
        allowed = "bytes, paths, or structs of bytes and path"
        raise BatchError(f"{file}: column {column!r} has no images: got {kind}; allowed: {allowed}")


def row_groups(files: Iterable[str], keep: tuple[str, ...], kept: KeptColumns) -> Iterator[list[Any]]:
    """`[file, rows of each row group]` of each file; widens the copied columns on the way."""
    for file in files:
        metadata = _metadata(file)
        if keep:
            kept.widen(file, keep, metadata.schema.to_arrow_schema())
        yield [file, [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]]


def _metadata(file: str) -> pq.FileMetaData:
    try:
        return pq.read_metadata(opened(file))
    except (OSError, pa.ArrowInvalid) as error:
        raise BatchError(f"{file}: not a Parquet file that can be read: {error}") from error


def opened(file: str) -> Any:
    if not is_url(file):
        return file
    import fsspec

    return fsspec.open(file, "rb").open()
