"""From a chunk of images to a table with one row per image. An image that cannot be answered is a row with an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from serving.batch.entries import Entry, is_url, read_entry
from serving.batch.parquet import KeptColumns, RowReader, row_entries
from serving.batch.plan import BatchPlan
from serving.batch.sources import Chunk
from serving.bundle.decision import OUTPUT_NAMES, decide
from serving.bundle.errors import BundleError, ImageError
from serving.bundle.model import BundleModel
from serving.bundle.pixels import open_image, to_pixels
from serving.errors import OutputError, RequestError, UnreadableFileError, refused_image
from serving.http.schemas import UNKNOWN

GROUP = 128
"""Images that are decided together: for a few, the decision would take as long as the graph."""

NUMBERS = {
    "class_id": pa.int32(),
    "task": pa.int32(),
    "confidence": pa.float64(),
    "p_within_task": pa.float64(),
    "p_task": pa.float64(),
    "p_value": pa.float64(),
    "unknown_score": pa.float64(),
}
"""Fields of an answer with the same names as in the API."""
TOP = {"top_labels": pa.list_(pa.string()), "top_probabilities": pa.list_(pa.float64())}


class _Failed(NamedTuple):
    code: str
    message: str


DIED = _Failed(
    "process_died",
    "no answer for this image: got a process that ended whenever it tried; allowed: an image that can be decoded in "
    "the memory of this machine",
)
Announce = Callable[[int | None], None]
"""Called with the place in its chunk of the image that is worked on, and with None after it."""


class Answerer:
    """A model that answers the chunks of a plan with its options."""

    def __init__(self, plan: BatchPlan) -> None:
        self._plan = plan
        options = plan.options
        self._model = BundleModel.load(
            plan.bundle, provider=plan.provider, precision=plan.precision, threads=plan.threads
        )
        manifest = self._model.manifest
        if manifest.version != options.version:
            raise BundleError(
                f"{plan.bundle}: version {manifest.version}, but the run began with {options.version}; "
                "allowed: the same bundle until it is complete"
            )
        self._labels = np.array([*manifest.labels, UNKNOWN], dtype=object)
        self._reader = RowReader(options.column, options.keep)
        self._kept = KeptColumns.decode(plan.kept)

    def answer(
        self, chunk: Chunk, lost: frozenset[int] = frozenset(), announce: Announce = lambda place: None
    ) -> pa.Table:
        """The answers, in the order of the images; those at places in `lost` are not tried."""
        made = _Rows(chunk.rows, len(self._labels) - 1, self._plan.options.top)
        names: list[str] = []
        waiting: list[int] = []
        shape = (GROUP, *self._model.manifest.image.shape)
        pixels = np.empty(shape, np.uint8)
        kept: list[pa.Table] = []
        for place, entry in enumerate(self._entries(chunk, kept, lost, announce)):
            names.append(entry.name)
            if place in lost:
                made.errors[place] = DIED
                continue
            announce(place)
            try:
                pixels[len(waiting)] = self._decoded(entry)
                waiting.append(place)
            except RequestError as error:
                made.errors[place] = _Failed(error.code, str(error))
            announce(None)
            if len(waiting) == GROUP:
                self._decide(pixels, waiting, made)
                waiting = []
        if waiting:
            self._decide(pixels[: len(waiting)], waiting, made)
        return self._table(chunk, names, made, kept)

    def _entries(self, chunk: Chunk, kept: list[pa.Table], lost: frozenset[int], announce: Announce) -> Iterator[Entry]:
        if chunk.group is not None:
            yield from self._row_entries(chunk, kept, lost)
            return
        source = self._plan.options.source
        root = source if is_url(source) else source.rstrip("/")
        for place, name in enumerate(chunk.files):
            if place in lost:
                yield Entry(name, b"")
                continue
            announce(place)
            yield read_entry(f"{root}/{name}", name)

    def _row_entries(self, chunk: Chunk, kept: list[pa.Table], lost: frozenset[int]) -> Iterator[Entry]:
        assert chunk.group is not None
        left, reason = chunk.rows, OSError("not tried")
        try:
            # If all rows are lost, reading them may be what ends the process.
            for batch in self._reader.read(chunk.group, chunk.rows) if len(lost) < chunk.rows else ():
                kept.append(self._kept.of(batch))
                left -= len(batch)
                yield from row_entries(batch, self._plan.options.column, chunk.group.file)
        except Exception as error:
            # A damaged page, or storage that fails: almost any exception, by format and file system.
            reason = OSError(f"{type(error).__name__}: {error}")
        if left:
            kept.append(self._kept.nulls(left))
            yield from (Entry("", reason) for _ in range(left))

    def _decoded(self, entry: Entry) -> NDArray[np.uint8]:
        if isinstance(entry.content, OSError):
            reason = entry.content.strerror or str(entry.content)
            raise UnreadableFileError("file cannot be read", got=reason, allowed="a readable image file")
        try:
            return to_pixels(open_image(entry.content), self._model.manifest.image)
        except ImageError as error:
            raise refused_image(error) from None

    def _decide(self, pixels: NDArray[np.uint8], places: list[int], made: _Rows) -> None:
        step, options = self._plan.batch, self._plan.options
        runs = [self._model.run(pixels[start : start + step]) for start in range(0, len(pixels), step)]
        outputs = {name: np.concatenate([run[name] for run in runs]) for name in OUTPUT_NAMES}
        finite = np.isfinite(np.concatenate(list(outputs.values()), axis=1)).all(axis=1)
        if not finite.all():
            error = OutputError("the network failed on this image", got="NaN or infinity", allowed="finite numbers")
            for place in np.asarray(places)[~finite].tolist():
                made.errors[place] = _Failed(error.code, str(error))
            outputs = {name: values[finite] for name, values in outputs.items()}
        if finite.any():
            verdicts = decide(outputs, self._model.bundle.rule, alpha=options.alpha, given_task=options.task)
            made.fill(np.asarray(places)[finite], verdicts)

    def _table(self, chunk: Chunk, names: list[str], made: _Rows, kept: list[pa.Table]) -> pa.Table:
        failed = np.zeros(chunk.rows, bool)
        failed[list(made.errors)] = True
        shown = np.where(made.known, made.numbers["class_id"], -1)
        columns: dict[str, Any] = {
            "row": pa.array(np.arange(chunk.first, chunk.first + chunk.rows)),
            "file": pa.array([_text(name or (chunk.group.file if chunk.group else "")) for name in names], pa.string()),
            "label": pa.array(self._labels[shown], pa.string(), mask=failed),
            "known": pa.array(made.known, mask=failed),
            "best_guess": pa.array(self._labels[made.numbers["class_id"]], pa.string(), mask=failed),
        }
        for name, kind in NUMBERS.items():
            columns[name] = pa.array(made.numbers[name], kind, mask=failed)
        if made.top is not None:
            listed = [None if bad else row for bad, row in zip(failed, made.top, strict=True)]
            columns["top_labels"] = pa.array(
                [None if row is None else self._labels[row].tolist() for row in listed], TOP["top_labels"]
            )
            shares = zip(failed, made.shares, strict=True)
            columns["top_probabilities"] = pa.array(
                [None if bad else row.tolist() for bad, row in shares], TOP["top_probabilities"]
            )
        failures = [made.errors.get(place, _Failed("", "")) for place in range(chunk.rows)]
        columns["error_code"] = pa.array([failure.code or None for failure in failures], pa.string())
        columns["error"] = pa.array([_text(failure.message) or None for failure in failures], pa.string())
        table = pa.table(columns)
        if kept and self._plan.options.keep:
            copied = pa.concat_tables(kept)
            for name in copied.column_names:
                table = table.append_column(kept_name(name, table), copied.column(name))
        return table


class _Rows:
    """The fields of all images of a chunk, filled in as they are decided."""

    def __init__(self, rows: int, classes: int, top: int) -> None:
        self.errors: dict[int, _Failed] = {}
        self.known = np.zeros(rows, bool)
        self.numbers = {
            name: np.zeros(rows, np.int64 if pa.types.is_integer(kind) else np.float64)
            for name, kind in NUMBERS.items()
        }
        self._width = min(top, classes)
        self.top: NDArray[np.int64] | None = np.zeros((rows, self._width), np.int64) if top else None
        self.shares = np.zeros((rows, self._width))

    def fill(self, places: NDArray[np.int64], verdicts: Any) -> None:
        each = np.arange(len(places))
        self.known[places] = verdicts.known
        values = {
            "class_id": verdicts.class_id,
            "task": verdicts.task,
            "confidence": verdicts.probability[each, verdicts.class_id],
            "p_within_task": verdicts.p_within_task[each, verdicts.class_id],
            "p_task": verdicts.p_task[each, verdicts.task],
            "p_value": verdicts.p_value,
            "unknown_score": verdicts.unknown_score,
        }
        for name, column in values.items():
            self.numbers[name][places] = column
        if self.top is not None:
            # Stable, as in the API: ties resolve as in the decision's argmax.
            order = np.argsort(-verdicts.probability, axis=1, kind="stable")[:, : self._width]
            self.top[places] = order
            self.shares[places] = np.take_along_axis(verdicts.probability, order, axis=1)


def kept_name(name: str, table: pa.Table) -> str:
    """The name of a copied column, which must not be that of an answer's column."""
    return f"source_{name}" if name in table.column_names else name


def _text(value: str) -> str:
    """Text that can be stored: bytes of a file name that are not UTF-8 are shown as escapes."""
    return value.encode("utf-8", "backslashreplace").decode()
