"""Answering a batch on a Ray cluster: one actor per processor or GPU; the driver stores the answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from serving.batch.answering import Answerer
from serving.batch.errors import BatchError
from serving.batch.parquet import RowGroup
from serving.batch.plan import BatchPlan, WorkFolder
from serving.batch.sources import Chunk
from serving.batch.workers import Done
from serving.bundle.cluster import Cluster, ClusterError


class _Answering:
    """Opens the bundle once, and answers one chunk after another."""

    def __init__(self, plan: str) -> None:
        self._answerer = Answerer(BatchPlan.model_validate_json(plan))

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        group = None if row["file"] is None else RowGroup(row["file"], int(row["group"]), int(row["start"]))
        chunk = Chunk(int(row["number"]), int(row["first"]), int(row["rows"]), tuple(row["files"]), group)
        answers = self._answerer.answer(chunk)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, answers.schema) as writer:
            writer.write_table(answers)
        return {"number": chunk.number, "answers": sink.getvalue().to_pybytes()}


def answer_chunks(
    plan: BatchPlan, out: Path, waiting: Iterator[Chunk], *, workers: int | None, gpus: bool
) -> Iterator[Done]:
    """Answer and store all chunks; yields what is done, in any order. By default there are as many actors as the
    cluster has processors, or GPUs."""
    work = WorkFolder(out)
    try:
        cluster = Cluster()
        actors = workers or max(1, cluster.processors(gpus=gpus))
        yield Done(0, 0)
        for row in cluster.map(_Answering, (plan.model_dump_json(),), map(_row, waiting), actors=actors, gpus=gpus):
            table = pa.ipc.open_stream(row["answers"]).read_all()
            work.store(int(row["number"]), table)
            yield Done(len(table), len(table) - table.column("error_code").null_count)
    except ClusterError as error:
        raise BatchError(str(error)) from error


def _row(chunk: Chunk) -> dict[str, Any]:
    """A chunk as a row of a data set, in which None has to keep its type."""
    file, group, start = chunk.group or (None, None, None)
    return {
        "number": chunk.number,
        "first": chunk.first,
        "rows": chunk.rows,
        "files": list(chunk.files),
        "file": file,
        "group": group,
        "start": start,
    }
