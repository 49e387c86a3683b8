"""Labels and images from and for other tools: a folder per class, or the JSON of Label Studio. Nothing is fetched."""

from __future__ import annotations

import base64
import io
import json
import re
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from urllib.parse import unquote

from pydantic_core import from_json

from serving.bundle.errors import ImageError
from serving.bundle.pixels import Limits, format_of
from serving.errors import MalformedRequestError, RequestError
from serving.inference.loaded import LoadedModel
from serving.quarantine.labels import check_label
from serving.quarantine.records import DamagedItemError, LabelError, UnknownIdError
from serving.teaching.api.schemas import FailedFile, Imported
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
MOST_ENTRIES = 25_000
"""Entries of an archive, folders and hidden files included: each takes a thousand bytes once the directory is read."""
MOST_UNPACKED = 1024**3
"""Bytes that are unpacked from an archive, or four times its size if that is more."""
MOST_PARTS = 1_000_000
"""Commas and opening brackets of Label Studio's JSON, which writes less than a hundred per task."""
MOST_ALIKE, MOST_FOLDERS = 50, 32
"""Files of the same name, in folders of the same name, that are told apart by the folders above; and of how many."""
_ENTRY = b"PK\x01\x02"
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_UNREADABLE = (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError, ValueError, OverflowError)
"""The errors that zipfile raises for a damaged, encrypted or hostile archive."""
_NOT_IN_PATHS = '/\\:*?"<>|'
_ESCAPED = re.compile("%(2F|5C|3A|2A|3F|22|3C|3E|7C|25|2E|20|5F)", re.IGNORECASE)
"""The characters that `folder_of` writes as URL escapes."""
_UPLOADED = re.compile("^[0-9a-f]{8}-")
"""The prefix that Label Studio puts before the name of an uploaded file."""
_ALLOWED = "a zip archive of class folders or of Label Studio, or Label Studio's JSON"


class Labelled(NamedTuple):
    """A file of an import; `name` is its place there."""

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
                name = f"{folder_of(str(example.label))}/{name}"
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
            label = check_label(one.label, loaded.model.manifest.labels)
            stored = store_example(store, loaded, one.content, limits, label, who)
        except (RequestError, LabelError, TeachError) as error:
            failed.append(FailedFile(name=one.name, reason=str(error)))
            continue
        added, duplicates = added + (not stored.duplicate), duplicates + stored.duplicate
        relabelled += stored.label_before not in (None, one.label)
    return Imported(added=added, duplicates=duplicates, relabelled=relabelled, failed=tuple(failed[:MOST_FAILED]))


def read_labelled(content: bytes, limits: Limits) -> Iterator[Labelled | Unusable]:
    """The labelled images of an archive, or of Label Studio's JSON with data: URLs."""
    if not content.startswith(b"PK"):
        yield from _from_tasks(_read_json(content), None, limits)
        return
    with _opened(content) as archive:
        files = {each.filename: each for each in archive.infolist() if not _hidden(each)}
        if len(files) > MOST_FILES:
            raise MalformedRequestError("too many files", got=str(len(files)), allowed=f"up to {MOST_FILES}")
        most = max(MOST_UNPACKED, 4 * len(content))
        if (unpacked := sum(each.file_size for each in files.values())) > most:
            raise MalformedRequestError("archive too large", got=f"{unpacked} bytes", allowed=f"up to {most} bytes")
        for name in sorted(files, key=lambda each: each.count("/")):
            if name.endswith(".json") and (tasks := _tasks(archive, files[name], limits)) is not None:
                yield from _from_tasks(tasks, ArchivedImages(archive, files, most), limits)
                return
        for name, each in files.items():
            folder = label_of(PurePosixPath(name).parent.name)
            if not folder:
                yield Unusable(name, "it is in no folder, and folders are the classes")
                continue
            try:
                image = _member(archive, each, limits)
            except MalformedRequestError as error:
                yield Unusable(name, str(error))
                continue
            yield Labelled(name, folder, image)


def _opened(content: bytes) -> zipfile.ZipFile:
    """An archive whose directory is read only if it is not too long."""
    if (entries := content.count(_ENTRY)) > MOST_ENTRIES:
        raise MalformedRequestError("too many files", got=f"{entries} entries", allowed=f"up to {MOST_ENTRIES}")
    try:
        return zipfile.ZipFile(io.BytesIO(content))
    except _UNREADABLE as error:
        raise MalformedRequestError("archive cannot be read", got=str(error), allowed=_ALLOWED) from None


class ArchivedImages:
    """Finds the file that a task of Label Studio names, which often is not the path that it has in an archive."""

    def __init__(self, archive: zipfile.ZipFile, files: dict[str, zipfile.ZipInfo], most: int) -> None:
        self._archive, self._files, self._left = archive, files, most
        self._by_base: dict[str, list[str]] = {}
        self._by_end: dict[tuple[str, ...], dict[str, tuple[str, ...]]] = {}
        """The files by the last folder and the name, with the last parts of their paths."""
        for name in files:
            path = PurePosixPath(name)
            parts = path.parts[-MOST_FOLDERS:]
            self._by_base.setdefault(path.name, []).append(name)
            self._by_end.setdefault(parts[-2:], {})[name] = parts

    def read(self, image: str, limits: Limits) -> bytes:
        """The content; a LookupError if no file fits, or if several fit equally well."""
        found = self._files[self._name_of(image)]
        # Many tasks may name the same file.
        self._left -= found.file_size
        if self._left < 0:
            raise LookupError(f"{image[:200]} is not unpacked: the tasks unpack to too many bytes")
        return _member(self._archive, found, limits)

    def _name_of(self, image: str) -> str:
        if image in self._files:
            return image
        # Label Studio puts folders and parameters before the name that the file had, and numbers in front of it.
        path = PurePosixPath(unquote(image).replace("?d=", "/"))
        for base in dict.fromkeys((path.name, _UPLOADED.sub("", path.name))):
            if found := self._by_base.get(base):
                best = self._closest((*path.parts[-MOST_FOLDERS:-1], path.name)) or found
                if len(best) > 1:
                    raise LookupError(f"{image[:200]} may be {' or '.join(best[:3])}")
                return best[0]
        raise LookupError(f"{image[:200]} is not in the archive, and nothing is fetched")

    def _closest(self, parts: tuple[str, ...]) -> list[str]:
        """The files whose last folders are equal to those of a path; none if not even the last one is."""
        alike = self._by_end.get(parts[-2:], {})
        if not 1 < len(alike) <= MOST_ALIKE:
            return list(alike)
        fits = {name: _same_end(each, parts) for name, each in alike.items()}
        most = max(fits.values())
        return [name for name, fit in fits.items() if fit == most]


def _same_end(one: Sequence[str], other: Sequence[str]) -> int:
    """How many parts at the end of two paths are equal."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(reversed(one), reversed(other), strict=False)))


def _from_tasks(tasks: Any, images: ArchivedImages | None, limits: Limits) -> Iterator[Labelled | Unusable]:
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
            if images is None:
                yield Unusable(name, f"{image[:200]} is not in the JSON itself, and nothing is fetched")
                continue
            yield Labelled(name, label, images.read(image, limits))
        except (AttributeError, LookupError, TypeError, ValueError, MalformedRequestError) as error:
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
    # Each small value takes many times its two bytes once it is parsed.
    if (parts := content.count(b",") + content.count(b"[") + content.count(b"{")) > MOST_PARTS:
        got = f"{parts} commas and opening brackets"
        raise MalformedRequestError("JSON has too many parts", got=got, allowed=f"up to {MOST_PARTS}")
    try:
        return from_json(content)
    except ValueError as error:
        raise MalformedRequestError("neither an archive nor JSON", got=str(error), allowed=_ALLOWED) from None


def _member(archive: zipfile.ZipFile, each: zipfile.ZipInfo, limits: Limits) -> bytes:
    """The content of a file, which is not unpacked beyond the size of an image."""
    most = limits.size
    if each.compress_type not in _METHODS:
        got = f"compression method {each.compress_type}"
        raise MalformedRequestError("file cannot be unpacked", got=got, allowed="stored or deflated")
    try:
        with archive.open(each) as file:
            content = file.read(most + 1)
    except _UNREADABLE as error:
        raise MalformedRequestError("file cannot be unpacked", got=str(error), allowed=_ALLOWED) from None
    if len(content) > most:
        raise MalformedRequestError("file too large", got=f"{each.file_size} bytes", allowed=f"up to {most} bytes")
    return content


def _hidden(each: zipfile.ZipInfo) -> bool:
    parts = PurePosixPath(each.filename).parts
    return each.is_dir() or any(part.startswith((".", "__MACOSX")) for part in parts)


def folder_of(label: str) -> str:
    """A label as the name of a folder: what a path cannot contain is written as in URLs, as in "a%2Fb" for "a/b"."""
    name = _ESCAPED.sub(lambda found: f"%25{found[1]}", label)
    name = "".join(f"%{ord(letter):02X}" if letter in _NOT_IN_PATHS else letter for letter in name)
    # Hidden folders are not read, and Windows drops dots and spaces at the end.
    name = re.sub(r"^(\.|_(?=_MACOSX)| )", _in_url, name)
    return re.sub(r"[. ]$", _in_url, name)


def label_of(folder: str) -> str:
    """The label of a folder: the inverse of `folder_of`. What no label is changed to is left as it is."""
    return _ESCAPED.sub(lambda found: chr(int(found[1], 16)), folder)


def _in_url(found: re.Match[str]) -> str:
    return f"%{ord(found[0]):02X}"


def _tasks(archive: zipfile.ZipFile, each: zipfile.ZipInfo, limits: Limits) -> Any | None:
    """What a JSON file contains: at the top of an archive tasks, in a folder only if it looks like them."""
    if "/" not in each.filename:
        return _read_json(_member(archive, each, limits))
    try:
        found = _read_json(_member(archive, each, limits))
    except MalformedRequestError:
        return None
    return found if isinstance(found, list) and found and isinstance(found[0], dict) and "data" in found[0] else None


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
