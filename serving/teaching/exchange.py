"""Labels and images from other tools: a folder per class, or the JSON of Label Studio. Nothing is fetched."""

from __future__ import annotations

import base64
import io
import re
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic_core import from_json

from serving.bundle.pixels import Limits
from serving.errors import MalformedRequestError, RequestError
from serving.inference.loaded import LoadedModel
from serving.quarantine.labels import check_label
from serving.quarantine.records import LabelError
from serving.teaching.api.schemas import FailedFile, Imported
from serving.teaching.errors import TeachError
from serving.teaching.intake import store_example
from serving.teaching.label_studio import ImageNames, advice, are_tasks, task_of

if TYPE_CHECKING:
    from serving.quarantine.store import Store

MOST_FILES = 10_000
MOST_FAILED = 100
"""Files that were not imported and are named in the response."""
MOST_ENTRIES = 25_000
"""Entries of an archive, folders and hidden files included: each takes a thousand bytes once the directory is read."""
MOST_UNPACKED = 1024**3
"""Bytes that are unpacked from an archive, or four times its size if that is more."""
MOST_PARTS = 1_000_000
"""Commas and opening brackets of Label Studio's JSON, which writes less than a hundred per task."""
_ZIP, _ENTRY = b"PK", b"PK\x01\x02"
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_UNREADABLE = (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError, ValueError, OverflowError)
"""The errors that zipfile raises for a damaged, encrypted or hostile archive."""
_NOT_IN_PATHS = '/\\:*?"<>|'
_ESCAPED = re.compile("%(2F|5C|3A|2A|3F|22|3C|3E|7C|25|2E|20|5F)", re.IGNORECASE)
"""The characters that `folder_of` writes as URL escapes."""
_ALLOWED = "a zip archive of class folders or of Label Studio, or Label Studio's JSON"


class Labelled(NamedTuple):
    """A file of an import; `name` is its place there."""

    name: str
    label: str
    content: bytes


class Unusable(NamedTuple):
    """A file or a task that cannot be imported, and why; `missing` is the image that the upload does not have."""

    name: str
    reason: str
    missing: str | None = None


def import_archive(store: Store, loaded: LoadedModel, content: bytes, limits: Limits, who: str) -> Imported:
    """Store and label every image of an archive; each one is durable."""
    added = duplicates = relabelled = 0
    failed: list[FailedFile] = []
    missing: list[str] = []
    for one in read_labelled(content, limits):
        try:
            if isinstance(one, Unusable):
                failed.append(FailedFile(name=one.name, reason=one.reason))
                missing += [] if one.missing is None else [one.missing]
                continue
            label = check_label(one.label, loaded.model.manifest.labels)
            stored = store_example(store, loaded, one.content, limits, label, who)
        except (RequestError, LabelError, TeachError) as error:
            failed.append(FailedFile(name=one.name, reason=str(error)))
            continue
        added, duplicates = added + (not stored.duplicate), duplicates + stored.duplicate
        relabelled += stored.label_before not in (None, one.label)
    return Imported(
        added=added,
        duplicates=duplicates,
        relabelled=relabelled,
        failed=tuple(failed[:MOST_FAILED]),
        advice=advice(list(dict.fromkeys(missing)), archive=content.startswith(_ZIP)),
    )


def read_labelled(content: bytes, limits: Limits) -> Iterator[Labelled | Unusable]:
    """The labelled images of an archive, or of Label Studio's JSON with data: URLs."""
    if not content.startswith(_ZIP):
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
        self._names = ImageNames(files)

    def read(self, image: str, limits: Limits) -> bytes | None:
        """The content; None if no file fits, and a LookupError if several fit equally well."""
        if (name := self._names.find(image)) is None:
            return None
        found = self._files[name]
        # Many tasks may name the same file.
        self._left -= found.file_size
        if self._left < 0:
            raise LookupError(f"{image[:200]} is not unpacked: the tasks unpack to too many bytes")
        return _member(self._archive, found, limits)


def _from_tasks(tasks: Any, images: ArchivedImages | None, limits: Limits) -> Iterator[Labelled | Unusable]:
    if not isinstance(tasks, list) or len(tasks) > MOST_FILES:
        got = f"{len(tasks)} tasks" if isinstance(tasks, list) else type(tasks).__name__
        raise MalformedRequestError("not Label Studio's JSON", got=got, allowed=f"a list of up to {MOST_FILES} tasks")
    for number, task in enumerate(tasks):
        name = f"task {task.get('id', number)}" if isinstance(task, dict) else f"task {number}"
        try:
            label, image = task_of(task)
            if label is None:
                yield Unusable(name, "no choice in its annotations")
                continue
            if image.startswith("data:"):
                yield Labelled(name, label, base64.b64decode(image.partition(",")[2], validate=True))
                continue
            if (content := None if images is None else images.read(image, limits)) is None:
                where = "JSON itself" if images is None else "archive"
                yield Unusable(name, f"{image[:200]} is not in the {where}, and nothing is fetched", image)
                continue
            yield Labelled(name, label, content)
        except (AttributeError, LookupError, TypeError, ValueError, MalformedRequestError) as error:
            # JSON of any shape: a text in place of a list, a list in place of an object.
            yield Unusable(name, f"not understood: {type(error).__name__} {error}"[:300])


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
    """The content of a JSON file; None for a file in a folder that does not look like tasks."""
    if "/" not in each.filename:
        return _read_json(_member(archive, each, limits))
    try:
        found = _read_json(_member(archive, each, limits))
    except MalformedRequestError:
        return None
    return found if are_tasks(found) else None
