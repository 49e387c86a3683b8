"""Labels and images from and for other tools: a folder per class, or the JSON of Label Studio. Nothing is fetched."""

from __future__ import annotations

import base64
import io
import json
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from urllib.parse import unquote

from pydantic_core import from_json

from serving.bundle.errors import ImageError
from serving.bundle.pixels import Limits, format_of
from serving.errors import MalformedRequestError, RequestError
from serving.inference.loaded import LoadedModel
from serving.quarantine.records import DamagedItemError, LabelError, UnknownIdError
from serving.teaching.api.schemas import FailedFile, Imported
from serving.teaching.curriculum import check_label
from serving.teaching.errors import TeachError
from serving.teaching.intake import store_example

if TYPE_CHECKING:
    from serving.quarantine.store import Store

Format = Literal["folders", "label-studio"]

MOST_FILES = 10_000
MOST_FAILED = 100
"""Files that were not imported and are named in the response."""
TASKS = "tasks.json"
_ENDINGS = {"PNG": "png", "JPEG": "jpg", "WEBP": "webp", "BMP": "bmp"}
_UNREADABLE = (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError)
"""What a damaged, encrypted or hostile archive raises."""
_ALLOWED = "a zip archive of class folders or of Label Studio, or Label Studio's JSON"


class Labelled(NamedTuple):
    """A file of an import: `name` says where it was."""

    name: str
    label: str
    content: bytes


class Unusable(NamedTuple):
    name: str
    reason: str


def export_archive(store: Store, kind: Format, label: str | None = None) -> Iterator[bytes]:
    """A zip archive of all labelled images, piece by piece: it may be larger than the memory."""
    pipe = _Pipe()
    tasks: list[dict[str, Any]] = []
    with zipfile.ZipFile(pipe, "w", zipfile.ZIP_STORED) as archive:
        for example in store.examples(label):
            try:
                content = store.image(example.id)
                ending = _ENDINGS[format_of(content)]
            except (DamagedItemError, UnknownIdError, ImageError):
                continue
            name = f"{example.id:06}.{ending}"
            if kind == "folders":
                name = f"{_folder(str(example.label))}/{name}"
            else:
                name = f"images/{name}"
                tasks.append(_task(example.id, name, str(example.label)))
            archive.writestr(name, content)
            yield pipe.taken()
        if kind == "label-studio":
            archive.writestr(TASKS, json.dumps(tasks, indent=1))
    yield pipe.taken()


def import_archive(store: Store, loaded: LoadedModel, content: bytes, limits: Limits, who: str) -> Imported:
    """Store and label every image of an archive; each is durable by itself."""
    added = duplicates = relabelled = 0
    failed: list[FailedFile] = []
    for one in read_labelled(content, limits):
        try:
            if isinstance(one, Unusable):
                failed.append(FailedFile(name=one.name, reason=one.reason))
                continue
            check_label(one.label)
            stored = store_example(store, loaded, one.content, limits, one.label, who)
        except (RequestError, LabelError, TeachError) as error:
            failed.append(FailedFile(name=one.name, reason=str(error)))
            continue
        added, duplicates = added + (not stored.duplicate), duplicates + stored.duplicate
        relabelled += stored.label_before not in (None, one.label)
    return Imported(added=added, duplicates=duplicates, relabelled=relabelled, failed=tuple(failed[:MOST_FAILED]))


def read_labelled(content: bytes, limits: Limits) -> Iterator[Labelled | Unusable]:
    """The labelled images of an archive, or of Label Studio's JSON with data: URLs."""
    if content[:4] != b"PK\x03\x04":
        yield from _from_tasks(_read_json(content), {}, limits)
        return
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            files = {each.filename: each for each in archive.infolist() if not _hidden(each)}
            if len(files) > MOST_FILES:
                raise MalformedRequestError("too many files", got=str(len(files)), allowed=f"up to {MOST_FILES}")
            if tasks := [name for name in files if name.endswith(".json")]:
                parsed = _read_json(_member(archive, files[tasks[0]], limits))
                images = {PurePosixPath(name).name: (archive, each) for name, each in files.items()}
                yield from _from_tasks(parsed, images, limits)
                return
            for name, each in files.items():
                folder = PurePosixPath(name).parent.name
                if not folder:
                    yield Unusable(name, "it is in no folder, and folders are the classes")
                    continue
                try:
                    yield Labelled(name, folder, _member(archive, each, limits))
                except (MalformedRequestError, *_UNREADABLE) as error:
                    yield Unusable(name, str(error))
    except _UNREADABLE as error:
        raise MalformedRequestError("archive cannot be read", got=str(error), allowed=_ALLOWED) from None


Images = dict[str, tuple[zipfile.ZipFile, zipfile.ZipInfo]]


def _from_tasks(tasks: Any, images: Images, limits: Limits) -> Iterator[Labelled | Unusable]:
    if not isinstance(tasks, list) or len(tasks) > MOST_FILES:
        got = f"{len(tasks)} tasks" if isinstance(tasks, list) else type(tasks).__name__
        raise MalformedRequestError("not Label Studio's JSON", got=got, allowed=f"a list of up to {MOST_FILES} tasks")
    for number, task in enumerate(tasks):
        name = f"task {task.get('id', number)}" if isinstance(task, dict) else f"task {number}"
        try:
            label, image = _choice(task), _image_of(task)
            if label is None:
                yield Unusable(name, "no choice in its annotations")
                continue
            if image.startswith("data:"):
                yield Labelled(name, label, base64.b64decode(image.partition(",")[2], validate=True))
                continue
            # Label Studio puts folders, parameters and a prefix before the name that the file had.
            base = PurePosixPath(unquote(image).replace("?d=", "/")).name
            if base not in images:
                yield Unusable(name, f"{image[:200]} is not in the archive, and nothing is fetched")
                continue
            yield Labelled(name, label, _member(*images[base], limits))
        except (AttributeError, LookupError, TypeError, ValueError, MalformedRequestError, *_UNREADABLE) as error:
            # JSON of any shape: a text in place of a list, a list in place of an object.
            yield Unusable(name, f"not understood: {type(error).__name__} {error}"[:300])


def _choice(task: dict[str, Any]) -> str | None:
    """The choice of the last annotation that was not cancelled."""
    given = [each for each in task.get("annotations", ()) if not each.get("was_cancelled")]
    for annotation in reversed(given):
        for result in annotation.get("result", ()):
            if result.get("type") == "choices" and result["value"]["choices"]:
                return str(result["value"]["choices"][0])
    return None


def _image_of(task: dict[str, Any]) -> str:
    """The image of a task: the field `image`, or the only text that there is."""
    data = task["data"]
    if isinstance(data.get("image"), str):
        return str(data["image"])
    (only,) = [value for value in data.values() if isinstance(value, str)]
    return only


def _task(number: int, name: str, label: str) -> dict[str, Any]:
    result = {"from_name": "label", "to_name": "image", "type": "choices", "value": {"choices": [label]}}
    return {"id": number, "data": {"image": name}, "annotations": [{"result": [result]}]}


def _read_json(content: bytes) -> Any:
    try:
        return from_json(content)
    except ValueError as error:
        raise MalformedRequestError("neither an archive nor JSON", got=str(error), allowed=_ALLOWED) from None


def _member(archive: zipfile.ZipFile, each: zipfile.ZipInfo, limits: Limits) -> bytes:
    """The content of a file, which is not unpacked beyond the size of an image."""
    most = limits.size
    with archive.open(each) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise MalformedRequestError("file too large", got=f"{each.file_size} bytes", allowed=f"up to {most} bytes")
    return content


def _hidden(each: zipfile.ZipInfo) -> bool:
    parts = PurePosixPath(each.filename).parts
    return each.is_dir() or any(part.startswith((".", "__MACOSX")) for part in parts)


def _folder(label: str) -> str:
    """A label as the name of a folder; what a path cannot contain is replaced."""
    name = "".join("_" if letter in '/\\:*?"<>|' else letter for letter in label).strip(". ")
    return name or "_"


class _Pipe(io.RawIOBase):
    """What is written to it can be taken out."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._parts.append(bytes(data))
        return len(data)

    def taken(self) -> bytes:
        parts, self._parts = self._parts, []
        return b"".join(parts)
