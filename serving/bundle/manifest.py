"""The bundle: a directory with everything that an answer needs, and checksums of it; `layout` names its files.

The reader owns the format; the exporter writes through the same classes.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError, model_validator
from pydantic_core import from_json

from serving.bundle.arrays import read_arrays
from serving.bundle.card import model_card
from serving.bundle.decision import OUTPUT_NAMES, Rule
from serving.bundle.embedding import Embedding
from serving.bundle.errors import BundleError
from serving.bundle.files import MOST_BYTES, MOST_MANIFEST, MOST_METADATA, read_regular
from serving.bundle.graph_outputs import output_names
from serving.bundle.labels import check_labels
from serving.bundle.layout import (
    CARD,
    EMBEDDING,
    GOLDEN,
    MANIFEST,
    MAPS,
    POOLED,
    RULE,
    TRUNK,
    adapter_name,
    detector_name,
    graph_name,
    lesson_name,
    parts_of,
    trunk_name,
)
from serving.bundle.own_scores import threshold
from serving.bundle.precisions import PRECISIONS, TRUNK_PRECISIONS
from serving.bundle.run_verdict import RunVerdict, TaughtVerdict
from serving.bundle.sections import (
    Cascade,
    ConsolidatedInfo,
    FileInfo,
    ImageSpec,
    LessonInfo,
    Origin,
    Section,
    TaskInfo,
    TrunkInfo,
)

FORMAT = 8
"""The version of the format. A change that an older reader would misread gets a new number."""
INPUT_NAME = "pixels"
EXPORT_AGAIN = "export the run again with `openworld export`"


class Manifest(Section):
    """The metadata of a bundle."""

    format: int
    name: str
    version: str
    created: str
    method: str
    preset: str
    seed: int
    image: ImageSpec
    trunk: TrunkInfo | None = Field(default=None, description="null if the network was learned from scratch")
    tasks: tuple[TaskInfo, ...] = Field(min_length=1)
    lessons: tuple[LessonInfo, ...] = Field(default=(), description="what was taught since the run, in order")
    consolidated: tuple[ConsolidatedInfo, ...] = Field(
        default=(), description="taught classes that have an adapter, together with those that they share it with"
    )
    origin: Origin | None = Field(default=None, description="where the run came from; null if that is not known")
    before: str | None = Field(description="version of the bundle that this one continues")
    precisions: tuple[str, ...] = Field(min_length=1)
    cascade: Cascade
    decision: str = Field(description="the name of the unknown score that decides")
    alpha: float
    threshold: float
    verdict: RunVerdict = Field(description="how good the run is")
    taught: tuple[TaughtVerdict, ...] = Field(
        default=(), description="how far classes that were taught, or taught more of, can be relied on"
    )
    metrics: dict[str, Any]
    versions: dict[str, str]
    verification: dict[str, dict[str, float]]
    files: dict[str, FileInfo]

    @model_validator(mode="after")
    def _check(self) -> Manifest:
        expected = 0
        for position, task in enumerate(self.tasks):
            if (task.task, task.first_class_id) != (position, expected):
                raise ValueError(
                    f"tasks[{position}] has task {task.task} and first_class_id {task.first_class_id}; "
                    f"expected {position} and {expected}: tasks and classes are numbered in order"
                )
            expected += len(task.labels)
        check_labels(self.labels)
        for name, text in (("name", self.name), ("method", self.method), ("preset", self.preset)):
            if not text.isprintable():
                raise ValueError(f"{name}: got {text!r}; allowed: printable characters")
        if unknown := [name for name in self.precisions if name not in PRECISIONS]:
            raise ValueError(f"precisions: got {', '.join(unknown)}; allowed: {', '.join(PRECISIONS)}")
        side = self.trunk and self.trunk.size
        if self.trunk and (self.image.shape != (side, side, 3) or not {*self.precisions} <= {*TRUNK_PRECISIONS}):
            raise ValueError(
                f"trunk of size {side} with images {self.image.shape} in {', '.join(self.precisions)}; "
                f"allowed: square colour images of its size, in {', '.join(TRUNK_PRECISIONS)}"
            )
        if self.lessons and self.trunk is None:
            raise ValueError(f"{len(self.lessons)} lessons without a trunk; allowed: none")
        known = set(self.labels)
        for number, lesson in enumerate(self.lessons):
            if not set(lesson.extends) <= set(lesson.images) <= known:
                raise ValueError(f"lessons[{number}] has examples of classes that are not in the bundle")
        taught = {label for lesson in self.lessons for label in lesson.images}
        sharing = [label for group in self.consolidated for label in group.labels]
        if len({*sharing}) != len(sharing) or not {*sharing} <= taught:
            raise ValueError(f"consolidated: got {', '.join(sharing)}; allowed: taught classes, each once")
        return self

    def graph_file(self, precision: str) -> str:
        """The file of the graph that reads pixels."""
        return graph_name(precision) if self.trunk is None else trunk_name(precision)

    @property
    def labels(self) -> tuple[str, ...]:
        """class_id -> label."""
        return tuple(label for task in self.tasks for label in task.labels)


@dataclass(frozen=True)
class Golden:
    """Images and the outputs of each graph for them at export."""

    pixels: NDArray[np.uint8]
    outputs: dict[str, dict[str, NDArray[np.float32]]]
    """Precision -> output -> values."""


@dataclass(frozen=True)
class Graph:
    """A serialized graph and its weight files by name."""

    model: bytes
    parts: dict[str, bytes]


@dataclass(frozen=True)
class Bundle:
    """A bundle whose manifest, rule and golden outputs were read and checked; graphs are read on demand."""

    path: Path
    manifest: Manifest
    rule: Rule
    golden: Golden

    def graph(self, precision: str) -> Graph:
        """Read one graph and check its files; raises a BundleError if it must not be served."""
        if precision not in self.manifest.precisions:
            raise BundleError(
                f"{self.path}: no {precision} graph; the bundle has {', '.join(self.manifest.precisions)}"
            )
        model = self._read(self.manifest.graph_file(precision))
        return Graph(model, {name: self._read(name) for name in parts_of(self.manifest.files, precision)})

    def arrays(self, name: str) -> dict[str, NDArray[Any]]:
        """The arrays in a checked file: the map, or with a trunk its classifier, or the detector of a task."""
        try:
            return read_arrays(self._read(name))
        except (OSError, ValueError) as error:
            raise BundleError(f"{self.path / name}: {error}; {EXPORT_AGAIN}") from error

    def maps_graph(self) -> Graph:
        """The graph with the feature maps of a trunk, whose weights are in the file of the trunk."""
        return Graph(self._read(MAPS), {TRUNK: self._read(TRUNK)})

    def map_outputs(self) -> list[str]:
        """The outputs of that graph, which an older bundle has even if none of them is a map; empty without it."""
        if MAPS not in self.manifest.files:
            return []
        try:
            return output_names(self._read(MAPS))
        except ValueError as error:
            raise BundleError(f"{self.path / MAPS}: {error}; {EXPORT_AGAIN}") from error

    def embedding(self) -> Embedding | None:
        """The map of features, if the bundle has one."""
        if EMBEDDING not in self.manifest.files:
            return None
        try:
            return Embedding.from_arrays(self.arrays(EMBEDDING))
        except (KeyError, ValueError) as error:
            raise BundleError(f"{self.path / EMBEDDING}: {error}; {EXPORT_AGAIN}") from error

    def check(self) -> None:
        """Verify the checksum of every file."""
        for name in self.manifest.files:
            self._read(name)

    def _read(self, name: str) -> bytes:
        return _read_checked(self.path, self.manifest, name)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def fingerprint(manifest: Manifest) -> str:
    """The version: a digest of the manifest without the version itself, the bundle before it, and who made it when.

    It covers the files' checksums, so equal versions mean equal answers, and an edited manifest is detected.
    """
    history: Any = {
        "version": True,
        "created": True,
        "before": True,
        "tasks": {"__all__": {"unchanged"}},
        "lessons": {"__all__": {"taught_by", "taught_at"}},
    }
    if not manifest.consolidated:
        history["consolidated"] = True
    if not manifest.taught:
        history["taught"] = True
    if manifest.origin is None:
        # Bundles that were written before it was recorded keep their version.
        history["origin"] = True
    elif not manifest.origin.export:
        history["origin"] = {"export"}
    content = manifest.model_dump(mode="json", exclude=history)
    return sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())[:12]


def seal(
    rule: Rule, golden: Golden, graphs: Mapping[str, FileInfo], **fields: Any
) -> tuple[Manifest, dict[str, bytes]]:
    """The manifest and the small files of a bundle with the large files `graphs`; `fields` are further metadata."""
    arrays: dict[str, Any] = {INPUT_NAME: golden.pixels}
    for precision, outputs in golden.outputs.items():
        arrays |= {f"{precision}.{name}": values for name, values in outputs.items()}
    stored = io.BytesIO()
    np.savez(stored, **arrays)
    files = {RULE: rule.model_dump_json(indent=1).encode(), GOLDEN: stored.getvalue()}
    described = {name: FileInfo(sha256=sha256(content), size=len(content)) for name, content in files.items()}
    draft = Manifest(
        format=FORMAT,
        version="",
        alpha=rule.alpha,
        decision=rule.score,
        threshold=threshold(rule.alpha),
        precisions=tuple(golden.outputs),
        files={**described, **graphs},
        **fields,
    )
    card = model_card(draft).encode()
    described[CARD] = FileInfo(sha256=sha256(card), size=len(card))
    draft = draft.model_copy(update={"files": {**described, **graphs}})
    manifest = draft.model_copy(update={"version": fingerprint(draft)})
    return manifest, {**files, CARD: card, MANIFEST: manifest.model_dump_json(indent=2).encode() + b"\n"}


def describe_file(path: Path) -> FileInfo:
    """Checksum and size of a file, read in pieces because it may be large."""
    with path.open("rb") as file:
        return FileInfo(sha256=hashlib.file_digest(file, "sha256").hexdigest(), size=path.stat().st_size)


def load_bundle(path: str | Path) -> Bundle:
    """Read a bundle; raises a BundleError if it must not be served."""
    folder = Path(path)
    if not folder.is_dir():
        raise BundleError(f"{folder}: no such bundle directory; make one with `openworld export RUN --out {folder}`")
    manifest = read_manifest(folder)
    parts = [name for task in manifest.tasks for name in task.parts]
    needed = [RULE, GOLDEN, *map(manifest.graph_file, manifest.precisions), *parts]
    needed += [POOLED, *map(detector_name, range(len(manifest.tasks)))] if manifest.trunk else []
    needed += map(lesson_name, range(len(manifest.lessons)))
    needed += map(adapter_name, range(len(manifest.consolidated)))
    if missing := [name for name in needed if name not in manifest.files]:
        raise BundleError(f"{folder / MANIFEST}: lists no {', '.join(missing)}")
    try:
        rule = Rule.model_validate_json(_read_checked(folder, manifest, RULE))
    except ValidationError as error:
        raise BundleError(f"{folder / RULE}: {first_error(error)}") from error
    if (rule.alpha, threshold(rule.alpha)) != (manifest.alpha, manifest.threshold):
        raise BundleError(
            f"{folder / RULE}: alpha {rule.alpha} with threshold {threshold(rule.alpha)}; "
            f"the manifest has {manifest.alpha} and {manifest.threshold}"
        )
    sizes = [len(task.labels) for task in manifest.tasks]
    if [task.classes for task in rule.tasks] != sizes:
        raise BundleError(
            f"{folder / RULE}: tasks of {[task.classes for task in rule.tasks]} classes; the manifest has {sizes}"
        )
    return Bundle(folder, manifest, rule, _read_golden(folder, manifest))


def read_manifest(folder: Path) -> Manifest:
    """The manifest alone, checked: its other files may be missing."""
    path = folder / MANIFEST
    try:
        content = read_regular(path, MOST_MANIFEST)
    except FileNotFoundError:
        raise BundleError(f"{folder}: no {MANIFEST}, so this is not a bundle") from None
    except OSError as error:
        raise BundleError(f"{path}: cannot be read as JSON: {error}; {EXPORT_AGAIN}") from error
    return parse_manifest(content, str(path))


def parse_manifest(content: bytes, path: str) -> Manifest:
    """The manifest in a file, checked; `path` is for messages."""
    try:
        # This parser limits the depth of nested lists.
        fields = from_json(content)
    except ValueError as error:
        raise BundleError(f"{path}: cannot be read as JSON: {error}; {EXPORT_AGAIN}") from error
    found = fields.get("format") if isinstance(fields, Mapping) else None
    if found != FORMAT:
        newer = isinstance(found, int) and found > FORMAT
        remedy = "update openworld, or export the run with this version" if newer else EXPORT_AGAIN
        raise BundleError(f"{path}: bundle format {found!r}; this version reads format {FORMAT}: {remedy}")
    try:
        manifest = Manifest.model_validate(fields)
    except ValidationError as error:
        raise BundleError(f"{path}: {first_error(error)}; {EXPORT_AGAIN}") from error
    if (got := fingerprint(manifest)) != manifest.version:
        raise BundleError(
            f"{path}: corrupt or edited: the content has version {got}, the manifest records {manifest.version}; "
            f"{EXPORT_AGAIN}"
        )
    for name in manifest.files:
        if name == ".." or Path(name).name != name or not name.isprintable():
            raise BundleError(f"{path}: file name {name!r} is outside the bundle, or not printable")
    return manifest


def _read_checked(folder: Path, manifest: Manifest, name: str) -> bytes:
    path, info = folder / name, manifest.files[name]
    most = MOST_METADATA if name in (RULE, GOLDEN) else MOST_BYTES
    if not 0 <= info.size <= most:
        raise BundleError(f"{path}: cannot be read: {info.size} bytes by the manifest; allowed: up to {most}")
    try:
        content = read_regular(path, info.size)
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise BundleError(f"{path}: corrupt: {error.strerror}, as the manifest records; {EXPORT_AGAIN}") from error
        raise BundleError(f"{path}: cannot be read: {error.strerror}") from error
    if (got := sha256(content)) != info.sha256:
        raise BundleError(
            f"{path}: corrupt: sha256 {got[:12]} of {len(content)} bytes; "
            f"the manifest records {info.sha256[:12]} of {info.size}; {EXPORT_AGAIN}"
        )
    return content


def _read_golden(folder: Path, manifest: Manifest) -> Golden:
    content, image = _read_checked(folder, manifest, GOLDEN), manifest.image
    try:
        stored = read_arrays(content)
        pixels = stored[INPUT_NAME]
        outputs = {
            precision: {name: stored[f"{precision}.{name}"] for name in OUTPUT_NAMES}
            for precision in manifest.precisions
        }
    except (ValueError, KeyError) as error:
        raise BundleError(f"{folder / GOLDEN}: {error}") from error
    if pixels.dtype != np.uint8 or pixels.shape[1:] != image.shape or len(pixels) == 0:
        raise BundleError(f"{folder / GOLDEN}: pixels are {pixels.dtype} {pixels.shape}; needed uint8 {image.shape}")
    return Golden(pixels, outputs)


def first_error(error: ValidationError) -> str:
    """The first validation error in one line."""
    detail = error.errors()[0]
    where = ".".join(map(str, detail["loc"]))
    return f"{where}: {detail['msg']}" if where else detail["msg"]
