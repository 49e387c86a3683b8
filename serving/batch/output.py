"""Joins the answers of all chunks to one file: Parquet, CSV or JSON lines, by the file's suffix."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, TextIO

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from serving.batch.errors import BatchError
from serving.bundle.atomic import replacing, sync

FORMATS = (".parquet", ".csv", ".jsonl")
ROW_GROUP = 64 * 1024
"""Rows that are written together, and held in memory."""


class _TableWriter(Protocol):
    def write(self, table: pa.Table) -> object: ...


def check_format(out: Path, *, lists: bool) -> None:
    """Raise a BatchError unless a file of this name can be written; CSV cannot have lists."""
    if out.suffix not in FORMATS:
        raise BatchError(f"{out}: no such format: got {out.suffix!r}; allowed: {', '.join(FORMATS)}")
    if lists and out.suffix == ".csv":
        raise BatchError(f"{out}: CSV has no lists: got --top; allowed: {FORMATS[0]} or {FORMATS[2]}, or no --top")


def join(out: Path, chunks: Iterator[pa.Table], about: dict[str, str]) -> None:
    """Write the tables to one file, which appears when it is complete; `about` becomes metadata of a Parquet file."""
    with replacing(out) as temporary, contextlib.ExitStack() as stack:
        writer: _TableWriter | None = None
        for table in _grouped(chunks):
            if writer is None:
                writer = stack.enter_context(_open(temporary, out.suffix, table.schema, about))
            writer.write(table)
        if writer is None:
            temporary.touch()
    with contextlib.suppress(OSError):
        sync(out.parent)


def _grouped(chunks: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Tables of about ROW_GROUP rows, which end where a chunk ends."""
    held: list[pa.Table] = []
    for chunk in chunks:
        held.append(chunk)
        if sum(map(len, held)) >= ROW_GROUP:
            yield pa.concat_tables(held).combine_chunks()
            held = []
    if held:
        yield pa.concat_tables(held).combine_chunks()


@contextlib.contextmanager
def _open(path: Path, suffix: str, schema: pa.Schema, about: dict[str, str]) -> Iterator[_TableWriter]:
    if suffix == ".parquet":
        described = schema.with_metadata({f"openworld.{name}": text for name, text in about.items()})
        with pq.ParquetWriter(path, described, compression="zstd") as parquet:
            yield _Parquet(parquet)
    elif suffix == ".csv":
        with pa_csv.CSVWriter(path, schema) as csv:
            yield csv
    else:
        with path.open("w", encoding="utf-8") as file:
            yield _JsonLines(file)


class _Parquet:
    def __init__(self, writer: pq.ParquetWriter) -> None:
        self._writer = writer

    def write(self, table: pa.Table) -> None:
        self._writer.write_table(table.replace_schema_metadata(self._writer.schema.metadata), row_group_size=len(table))


class _JsonLines:
    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, table: pa.Table) -> None:
        for row in table.to_pylist():
            # Fields without a value are left out: an answer has no error, and an error has no answer.
            present = {name: value for name, value in row.items() if value is not None}
            self._file.write(json.dumps(present, default=str) + "\n")
