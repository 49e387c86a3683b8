"""The plan of a batch, and the folder in which its work is kept until it is complete."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from serving.batch.errors import BatchError
from serving.bundle.atomic import locked, replace_file, replacing

FORMAT = 2
"""The version of plan, list and chunks."""
PLAN, ITEMS, COMPLETE = "plan.json", "images.jsonl", "complete.json"
CHUNK = 128
"""Images that are answered, stored and possibly lost together. At the end, a process waits for the others at most as
long as one chunk takes."""
MOST_VALUES, MOST_IMAGES = 1_250_000, 64
"""Numbers and images that one run of the graph gets: 8 photos of 224x224 pixels, or 64 small images."""


SourceKind = Literal["files", "rows"]
"""Image files, or rows of Parquet files."""


def batch_size(shape: Sequence[int]) -> int:
    """Images of this shape in one run of the graph.

    It is not measured, as a server does: on a busy machine two runs would choose differently, and numbers that are
    computed in other batches differ in their last bits.
    """
    return max(1, min(MOST_IMAGES, MOST_VALUES // math.prod(shape)))


class BatchOptions(BaseModel):
    """What was asked for. A run is only continued with the same options."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str = Field(description="a folder or a Parquet file; absolute, or a URL")
    version: str = Field(description="the version of the bundle")
    column: str = Field(description="the column of a Parquet file that has the images")
    keep: tuple[str, ...] = Field(description="columns of a Parquet file that are copied")
    task: int | None
    alpha: float
    top: int = Field(description="classes to list for each image; 0: none")


class BatchPlan(BaseModel):
    """The options, and what was decided when the run began."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = FORMAT
    options: BatchOptions
    kind: SourceKind
    bundle: str
    provider: str
    precision: str = Field(description="fixed, because processes that measure for themselves may choose differently")
    batch: int = Field(ge=1, description="images in one run of the graph")
    chunk: int = Field(ge=1)
    images: int = Field(ge=0)
    threads: int = Field(ge=1, description="of each process; numbers may differ in their last bits with others")
    kept: str = Field(description="names and types of the copied columns, as KeptColumns encodes them")
    warning: str | None = Field(default=None, description="why the answers of the bundle should not be relied on")


class CompleteRun(BaseModel):
    """What is known of a run whose output file is complete."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    options: BatchOptions
    errors: int


class WorkFolder:
    """Plan, list of images and finished chunks of a run, next to its output file."""

    def __init__(self, out: Path) -> None:
        self.path = out.with_name(f"{out.name}.unfinished")

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Be the only process that works for this output file."""
        try:
            self.path.mkdir(exist_ok=True)
        except OSError as error:
            allowed = "an output file in a folder that exists and can be written"
            raise BatchError(f"{self.path}: cannot be made: got {error.strerror}; allowed: {allowed}") from error
        with locked(self.path) as held:
            if not held:
                raise BatchError(f"{self.path}: another process writes this file; allowed: one at a time")
            try:
                yield
            finally:
                if not self.begun:
                    shutil.rmtree(self.path, ignore_errors=True)

    @property
    def begun(self) -> bool:
        return (self.path / PLAN).is_file()

    def completed(self) -> CompleteRun | None:
        """The run whose output file is complete, if the process was killed while it cleaned up."""
        try:
            return CompleteRun.model_validate_json((self.path / COMPLETE).read_bytes())
        except (OSError, ValidationError):
            return None

    def plan(self) -> BatchPlan:
        """The plan of the run that began here."""
        try:
            return BatchPlan.model_validate_json((self.path / PLAN).read_bytes())
        except (OSError, ValidationError) as error:
            raise BatchError(f"{self.path / PLAN}: cannot be continued; --overwrite begins again") from error

    def begin(self, items: Iterable[Any]) -> int:
        """Store the list of what is to be answered, as one JSON value per line; returns its length."""
        count = 0
        with replacing(self.path / ITEMS) as temporary, temporary.open("w", encoding="ascii") as file:
            for item in items:
                file.write(json.dumps(item) + "\n")
                count += 1
        return count

    def store_plan(self, plan: BatchPlan) -> None:
        """From here on the run can be continued."""
        replace_file(self.path / PLAN, plan.model_dump_json(indent=1).encode())

    def items(self) -> Iterator[Any]:
        with (self.path / ITEMS).open(encoding="ascii") as file:
            yield from map(json.loads, file)

    def store(self, number: int, answers: pa.Table) -> None:
        """Store the answers of a chunk, completely or not at all, even if the power fails."""
        # Two processes may store the same chunk, if one of them has lost its parent. Their answers are equal.
        with (
            replacing(self._chunk(number), shared=True) as temporary,
            pa.OSFile(str(temporary), "wb") as sink,
            pa.ipc.new_file(sink, answers.schema) as writer,
        ):
            writer.write_table(answers)

    def answers(self, number: int) -> pa.Table | None:
        """The stored answers of a chunk; None if there are none, or the file is damaged."""
        try:
            with pa.OSFile(str(self._chunk(number))) as file, pa.ipc.open_file(file) as reader:
                return reader.read_all()
        except (OSError, pa.ArrowInvalid):
            return None

    def clear(self) -> None:
        """Forget the run; the plan first, because without it nothing is continued."""
        (self.path / PLAN).unlink(missing_ok=True)
        for file in self.path.iterdir():
            file.unlink(missing_ok=True)

    def finish(self, run: CompleteRun) -> None:
        """The output file is complete: the folder is removed when it is left."""
        replace_file(self.path / COMPLETE, run.model_dump_json().encode())
        (self.path / PLAN).unlink(missing_ok=True)

    def _chunk(self, number: int) -> Path:
        return self.path / f"{number:08}.arrow"
