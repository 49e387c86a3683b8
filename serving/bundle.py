"""The bundle: a directory that holds everything an answer needs, and proves it.

    manifest.json   what is inside, with the sha256 of every other file
    rule.json       the decision rule's numbers
    model.onnx      8-bit pixels in, the rule's inputs out
    golden.npz      a few images with the outputs that they must give

The reader owns the format; the exporter writes through the same classes.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from serving.decision import OUTPUT_NAMES, Rule, threshold

FORMAT = 1
MANIFEST, RULE, GRAPH, GOLDEN = "manifest.json", "rule.json", "model.onnx", "golden.npz"
INPUT_NAME = "pixels"


class BundleError(Exception):
    """A bundle that must not be served; the message says which one and why."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ImageSpec(_Part):
    """The pixels that the graph takes: uint8, [batch, height, width, channels]."""

    height: int = Field(gt=0)
    width: int = Field(gt=0)
    mode: Literal["L", "RGB"]

    @property
    def channels(self) -> int:
        return 1 if self.mode == "L" else 3

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.height, self.width, self.channels


class Calibration(_Part):
    """A task's logits leave the graph as scale * logit + shift."""

    scale: float
    shift: float


class TaskInfo(_Part):
    """One learned task; `labels[i]` belongs to class_id `first_class_id + i`."""

    task: int
    first_class_id: int
    labels: tuple[str, ...] = Field(min_length=1)
    calibration: Calibration


class FileInfo(_Part):
    sha256: str
    size: int


class Manifest(_Part):
    """What a bundle says of itself."""

    format: int
    name: str
    version: str
    created: str
    method: str
    preset: str
    seed: int
    image: ImageSpec
    tasks: tuple[TaskInfo, ...] = Field(min_length=1)
    alpha: float
    threshold: float
    metrics: dict[str, Any]
    versions: dict[str, str]
    verification: dict[str, float]
    files: dict[str, FileInfo]

    @model_validator(mode="after")
    def _check(self) -> Manifest:
        expected = 0
        for position, task in enumerate(self.tasks):
            if (task.task, task.first_class_id) != (position, expected):
                raise ValueError(
                    f"tasks[{position}] says task {task.task} and first_class_id {task.first_class_id}; "
                    f"expected {position} and {expected}: tasks and classes are numbered in order"
                )
            expected += len(task.labels)
        return self

    @property
    def labels(self) -> tuple[str, ...]:
        """class_id -> label."""
        return tuple(label for task in self.tasks for label in task.labels)

    @property
    def first_class_ids(self) -> tuple[int, ...]:
        return tuple(task.first_class_id for task in self.tasks)


@dataclass(frozen=True)
class Golden:
    """Images and the outputs that the graph gave for them when it was exported."""

    pixels: NDArray[np.uint8]
    outputs: dict[str, NDArray[np.float32]]


@dataclass(frozen=True)
class Bundle:
    """A bundle whose files were all read and checked."""

    path: Path
    manifest: Manifest
    rule: Rule
    graph: bytes
    golden: Golden


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def fingerprint(manifest: Manifest) -> str:
    """The version: a digest of all that a manifest says, but for the version itself and the time of writing.

    The files' checksums are part of it, so equal versions mean equal answers, and an edited manifest is noticed.
    """
    content = manifest.model_dump(mode="json", exclude={"version", "created"})
    return sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())[:12]


def seal(rule: Rule, graph: bytes, golden: Golden, **said: Any) -> tuple[Manifest, dict[str, bytes]]:
    """All files of a bundle; `said` is what its manifest says beyond what follows from them."""
    arrays: dict[str, Any] = {INPUT_NAME: golden.pixels, **golden.outputs}
    stored = io.BytesIO()
    np.savez(stored, **arrays)
    files = {RULE: rule.model_dump_json(indent=1).encode(), GRAPH: graph, GOLDEN: stored.getvalue()}
    draft = Manifest(
        format=FORMAT,
        version="",
        alpha=rule.alpha,
        threshold=threshold(rule.alpha),
        files={name: FileInfo(sha256=sha256(content), size=len(content)) for name, content in files.items()},
        **said,
    )
    manifest = draft.model_copy(update={"version": fingerprint(draft)})
    return manifest, {**files, MANIFEST: manifest.model_dump_json(indent=2).encode() + b"\n"}


def load_bundle(path: str | Path) -> Bundle:
    """Read a bundle, or say in a BundleError why it must not be served."""
    folder = Path(path)
    if not folder.is_dir():
        raise BundleError(f"{folder}: no such bundle directory; make one with `python -m export RUN --out {folder}`")
    manifest = _read_manifest(folder)
    contents = {name: _read_checked(folder, name, info) for name, info in manifest.files.items()}
    missing = [name for name in (RULE, GRAPH, GOLDEN) if name not in contents]
    if missing:
        raise BundleError(f"{folder / MANIFEST}: lists no {', '.join(missing)}")
    try:
        rule = Rule.model_validate_json(contents[RULE])
    except ValidationError as error:
        raise BundleError(f"{folder / RULE}: {_first(error)}") from error
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
    return Bundle(folder, manifest, rule, contents[GRAPH], _read_golden(folder, contents[GOLDEN], manifest.image))


def _read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise BundleError(f"{folder}: no {MANIFEST}, so this is not a bundle") from None
    except (OSError, ValueError) as error:
        raise BundleError(f"{path}: cannot be read as JSON: {error}") from error
    found = content.get("format") if isinstance(content, Mapping) else None
    if found != FORMAT:
        raise BundleError(f"{path}: format {found!r}; this version reads format {FORMAT}")
    try:
        manifest = Manifest.model_validate(content)
    except ValidationError as error:
        raise BundleError(f"{path}: {_first(error)}") from error
    if (got := fingerprint(manifest)) != manifest.version:
        raise BundleError(f"{path}: corrupt or edited: its content is version {got}, it says {manifest.version}")
    return manifest


def _read_checked(folder: Path, name: str, info: FileInfo) -> bytes:
    path = folder / name
    if Path(name).name != name:
        raise BundleError(f"{folder / MANIFEST}: file name {name!r} leaves the bundle")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BundleError(f"{path}: cannot be read: {error}") from error
    if (got := sha256(content)) != info.sha256:
        raise BundleError(
            f"{path}: corrupt: sha256 {got[:12]} of {len(content)} bytes; "
            f"the manifest says {info.sha256[:12]} of {info.size}"
        )
    return content


def _read_golden(folder: Path, content: bytes, image: ImageSpec) -> Golden:
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as stored:
            pixels = stored[INPUT_NAME]
            outputs = {name: stored[name] for name in OUTPUT_NAMES}
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise BundleError(f"{folder / GOLDEN}: {error}") from error
    if pixels.dtype != np.uint8 or pixels.shape[1:] != image.shape or len(pixels) == 0:
        raise BundleError(f"{folder / GOLDEN}: pixels are {pixels.dtype} {pixels.shape}; needed uint8 {image.shape}")
    return Golden(pixels, outputs)


def _first(error: ValidationError) -> str:
    """The first complaint of a validation, in one line."""
    detail = error.errors()[0]
    where = ".".join(map(str, detail["loc"]))
    return f"{where}: {detail['msg']}" if where else detail["msg"]
