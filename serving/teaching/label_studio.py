"""The files of Label Studio: its two kinds of JSON, its labelling configuration, and where its images are.

Both kinds of JSON are lists of tasks. In JSON, a task has its fields in `data` and what people chose in `annotations`.
In JSON-MIN, a task has its fields and the choices side by side, under names that the project has given them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import unquote
from xml.sax.saxutils import quoteattr

TASKS, CONFIG, IMAGES = "tasks.json", "config.xml", "images"
CHOICES, IMAGE = "label", "image"
"""The names of the choices and of the image, in tasks and in the configuration that are written here."""
SHOWN = 5
"""Missing images that a message names."""
MOST_ALIKE, MOST_FOLDERS = 50, 32
"""How many files whose name and folder are equal are compared by the folders above, and how many of these folders."""

_LOCAL = "/data/local-files/?d="
"""How a task names a file of Label Studio's local storage: after it is the path below the document root."""
_UPLOADED = re.compile("^[0-9a-f]{8}-")
"""The prefix that Label Studio puts before the name of an uploaded file."""
_UPLOADS = "/data/upload/"
_CHOICE_NAMES = (CHOICES, "choice", "choices", "class", "category")
"""Names that the choice of a class often has in JSON-MIN; `choice` is that of Label Studio's template."""
_OF_LABEL_STUDIO = frozenset(
    ("id", "inner_id", "annotator", "annotation_id", "created_at", "updated_at", "lead_time", "agreement", "project")
)
"""Fields of JSON-MIN that no project has named."""
_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".svg", ".avif", ".heic")


class ChosenLabel(NamedTuple):
    """What is needed of a task: the class that was chosen, if one was, and the text that names the image."""

    label: str | None
    image: str


def task_of(found: Any) -> ChosenLabel:
    """A task in either kind of JSON; raises a LookupError, TypeError, ValueError or AttributeError if it is none."""
    if not isinstance(found, dict):
        raise TypeError(f"a task is {type(found).__name__}; allowed: an object")
    if "data" in found or "annotations" in found:
        fields = found["data"]
        return ChosenLabel(_choice(found), fields[_image_field(fields)])
    fields = {name: value for name, value in found.items() if name not in _OF_LABEL_STUDIO}
    image = _image_field(fields)
    return ChosenLabel(_choice_in({name: value for name, value in fields.items() if name != image}), fields[image])


def are_tasks(found: Any) -> bool:
    """Whether the content of a JSON file looks like tasks, of either kind."""
    if not (isinstance(found, list) and found and isinstance(found[0], dict)):
        return False
    first = found[0]
    return "data" in first or any(isinstance(value, str) and _is_image(value) for value in first.values())


def written_task(number: int, name: str, label: str) -> dict[str, Any]:
    """A task with its choice, whose image is `images/name` below the document root of Label Studio's local storage."""
    choice = {"id": CHOICES, "from_name": CHOICES, "to_name": IMAGE, "type": "choices", "value": {"choices": [label]}}
    return {
        "id": number,
        "data": {IMAGE: f"{_LOCAL}{IMAGES}/{name}"},
        "annotations": [{"result": [choice]}],
    }


def labelling_config(labels: Iterable[str]) -> str:
    """The labelling configuration of a project that shows an image and lets a person choose one of these classes."""
    choices = "".join(f"    <Choice value={quoteattr(label)}/>\n" for label in labels)
    return (
        "<View>\n"
        f'  <Image name="{IMAGE}" value="${IMAGE}"/>\n'
        f'  <Choices name="{CHOICES}" toName="{IMAGE}" choice="single">\n'
        f"{choices}"
        "  </Choices>\n"
        "</View>\n"
    )


def advice(missing: Sequence[str], *, archive: bool) -> str | None:
    """Which images the tasks name and the upload lacks, and how to bring them; None if there are none."""
    names = [_base(image)[:80] for image in missing]
    if not names:
        return None
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    are = "1 image is" if len(names) == 1 else f"{len(names)} images are"
    where = "the archive" if archive else "the JSON file"
    how = (
        "Put them into the archive, in any folder, under the names that they have in Label Studio."
        if archive
        else "Label Studio's JSON has only the names of images: pack the JSON file and the images into one zip "
        "archive, and import that."
    )
    kept = "Label Studio keeps uploaded images in the folder media/upload of its data directory."
    return f"{are} not in {where}: {', '.join(names[:SHOWN])}{more}. {how} {kept}"


class ImageNames:
    """The names of the files in an archive, found by what a task of Label Studio calls them."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        self._by_base, self._by_stored = _Index(), _Index()
        for name in sorted(self._names):
            path = PurePosixPath(name)
            self._by_base.add(path.name, path.parent.name, name)
            self._by_stored.add(_stored(path.name), path.parent.name, name)

    def find(self, image: str) -> str | None:
        """The one file that a task means; None without any, and a LookupError if several fit equally well."""
        if image in self._names:
            return image
        path = PurePosixPath(_path(image))
        for found in self._candidates(path, uploaded=_UPLOADS in image):
            best = _closest(found, path)
            if len(best) > 1:
                raise LookupError(f"{image[:200]} may be {' or '.join(best[:3])}")
            return best[0]
        return None

    def _candidates(self, path: PurePosixPath, *, uploaded: bool) -> Iterator[list[str]]:
        """Files with this name, or with the name that an uploaded file had before; if there are some in a folder of the
        same name, only these."""
        base = path.name
        bases = [base, _UPLOADED.sub("", base), *([base.partition("-")[2]] if uploaded else [])]
        for index in (self._by_base, self._by_stored):
            for each in dict.fromkeys(bases):
                if found := index.find(each, path.parent.name):
                    yield found


class _Index:
    """Files by their name, and by their folder and name, so that one of many is found quickly."""

    def __init__(self) -> None:
        self._by_name: dict[str, list[str]] = {}
        self._by_folder: dict[tuple[str, str], list[str]] = {}

    def add(self, name: str, folder: str, file: str) -> None:
        self._by_name.setdefault(name, []).append(file)
        self._by_folder.setdefault((folder, name), []).append(file)

    def find(self, name: str, folder: str) -> list[str]:
        return self._by_folder.get((folder, name)) or self._by_name.get(name, [])


def _closest(files: list[str], path: PurePosixPath) -> list[str]:
    """The files of which most folders at the end are those of the path; all of very many, which takes too long."""
    if not 1 < len(files) <= MOST_ALIKE:
        return files
    folders = path.parent.parts[-MOST_FOLDERS:]
    fits = {file: _same_end(PurePosixPath(file).parent.parts[-MOST_FOLDERS:], folders) for file in files}
    most = max(fits.values())
    return [file for file, fit in fits.items() if fit == most]


def _same_end(one: Sequence[str], other: Sequence[str]) -> int:
    """How many parts at the end of two paths are equal."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(reversed(one), reversed(other), strict=False)))


def _path(image: str) -> str:
    """Label Studio puts folders and parameters before the name that a file has, in the notation of URLs."""
    return unquote(image).replace("?d=", "/").replace("\\", "/")


def _base(image: str) -> str:
    return PurePosixPath(_path(image)).name or image


def _stored(base: str) -> str:
    """The name under which Label Studio stores an uploaded file: without spaces and special characters."""
    return re.sub(r"[^-\w.]", "", base.strip().replace(" ", "_"))


def _is_image(text: str) -> bool:
    return text.startswith("data:image/") or _path(text).partition("?")[0].lower().endswith(_ENDINGS)


def _image_field(fields: Mapping[str, Any]) -> str:
    """The field that names the image: `image`, the only one that looks like an image, or the only text."""
    texts = {name: value for name, value in fields.items() if isinstance(value, str)}
    if IMAGE in texts:
        return IMAGE
    named = [name for name, value in texts.items() if _is_image(value)] or list(texts)
    if len(named) != 1:
        got = ", ".join(map(repr, named)) or "none"
        raise LookupError(f"which field is the image? got {got}; allowed: a field {IMAGE!r}, or only one with a file")
    return named[0]


def _choice(task: Mapping[str, Any]) -> str | None:
    """The choice of the last annotation that was not cancelled."""
    given = [each for each in task.get("annotations", ()) if not each.get("was_cancelled")]
    for annotation in reversed(given):
        for result in annotation.get("result", ()):
            if result.get("type") == "choices" and result["value"]["choices"]:
                return str(result["value"]["choices"][0])
    return None


def _choice_in(fields: Mapping[str, Any]) -> str | None:
    """The choice in the fields of JSON-MIN: a text, or {"choices": [...]} if several were possible."""
    several = [value["choices"] for value in fields.values() if isinstance(value, dict) and value.get("choices")]
    texts = {name: value for name, value in fields.items() if isinstance(value, str) and value}
    named = [texts[name] for name in _CHOICE_NAMES if name in texts]
    if several:
        return str(several[0][0])
    if named or not texts:
        return named[0] if named else None
    if len(texts) > 1:
        got = ", ".join(map(repr, texts))
        raise LookupError(f"which field is the class? got {got}; allowed: a field {CHOICES!r} or 'choice', or only one")
    return next(iter(texts.values()))
