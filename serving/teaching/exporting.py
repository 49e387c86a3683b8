"""Archives of labels and images, for other tools or another server: class folders, or the files of Label Studio."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from serving.bundle.errors import ImageError
from serving.bundle.pixels import format_of
from serving.quarantine.records import DamagedItemError, Example, UnknownIdError
from serving.teaching.exchange import MOST_FILES, folder_of
from serving.teaching.label_studio import CONFIG, IMAGES, TASKS, labelling_config, written_task

if TYPE_CHECKING:
    from serving.quarantine.store import Store

Format = Literal["folders", "label-studio"]

RESERVED = 16 * 1024
"""Bytes of an archive that are kept for its end and for the first lines of its JSON."""
_ENDINGS = {"PNG": "png", "JPEG": "jpg", "WEBP": "webp", "BMP": "bmp"}


def parts_of(examples: Sequence[Example], most: int, labels: Sequence[str] = ()) -> list[Sequence[Example]]:
    """The examples of each archive, such that an import accepts an archive of up to `most` bytes; at least one part.

    They are in the order of their ids, so that new examples change only the last part. `labels` are all classes.
    """
    left = budget = most - RESERVED - len(labelling_config(labels).encode())
    starts = [0]
    for number, each in enumerate(examples):
        left -= _cost(each)
        if number > starts[-1] and (left < 0 or number - starts[-1] >= MOST_FILES - 2):
            starts.append(number)
            left = budget - _cost(each)
    return [examples[start:end] for start, end in zip(starts, [*starts[1:], len(examples)], strict=True)]


def export_archive(
    store: Store, kind: Format, examples: Sequence[Example], labels: Sequence[str] = (), part: int | None = None
) -> Iterator[bytes]:
    """A zip archive of examples, piece by piece: it may be larger than the memory.

    `labels` are all classes that a person may choose from in Label Studio. With a number of a `part`, its tasks have a
    name of their own, so that all parts can be unpacked into one folder.
    """
    pipe = _Pipe()
    tasks: list[dict[str, Any]] = []
    with zipfile.ZipFile(pipe, "w", zipfile.ZIP_STORED) as archive:
        for example in examples:
            try:
                content = store.image(example.id)
                ending = _ENDINGS[format_of(content)]
            except (DamagedItemError, UnknownIdError, ImageError):
                continue
            name = f"{example.id:06}.{ending}"
            folder = IMAGES if kind == "label-studio" else folder_of(str(example.label))
            tasks.append(written_task(example.id, name, str(example.label)))
            archive.writestr(f"{folder}/{name}", content)
            yield pipe.taken()
        if kind == "label-studio":
            archive.writestr(TASKS if part is None else TASKS.replace(".", f"-{part}."), json.dumps(tasks, indent=1))
            archive.writestr(CONFIG, labelling_config(labels))
    yield pipe.taken()


def _cost(example: Example) -> int:
    """Bytes that an example takes in an archive, at most: its file, two entries with its folder, and its task."""
    return example.size + 1000 + 24 * len(str(example.label))


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
