"""The data of a bundle with a trunk from which a server can learn classes; none of it is read to answer an image.

`Teachable` is what the classes of a run add to the pooled statistics. A `Lesson` is what was taught at one time since:
the encoded vectors of its examples, by label, and what the lesson after it starts from. A taught class is taken out by
leaving its examples out and repeating the lessons after it.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.bundle.arrays import read_arrays
from serving.bundle.layout import STATISTICS, lesson_name
from serving.bundle.pooled import ChoiceMemory, PooledSettings
from serving.bundle.pooled.factors import ClassFactors

Arrays = Mapping[str, NDArray[Any]]

MEMORY = "memory."


@dataclass(frozen=True)
class Teachable:
    """The part of each class of a run, in the order of the bundle, and the settings that the run chose."""

    factors: ClassFactors
    memory: ChoiceMemory
    settings: PooledSettings

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Everything as arrays, for a file."""
        return {**self.factors.to_arrays(), **_kept(self.memory), "settings": _text(self.settings)}

    @classmethod
    def from_arrays(cls, arrays: Arrays) -> Teachable:
        """The content of `to_arrays`; raises a KeyError or a ValueError if it is not complete."""
        return cls(ClassFactors.from_arrays(arrays), _memory(arrays), _settings(arrays))


@dataclass(frozen=True)
class TaughtLesson:
    """Examples that were taught together: row i shows `labels[classes[i]]` and is named by `digests[i]`.

    `memory` and `settings` are those after the lesson.
    """

    labels: tuple[str, ...]
    classes: NDArray[np.int64]  # [n]
    vectors: NDArray[np.float32]  # [n, dim]
    digests: tuple[str, ...]
    memory: ChoiceMemory
    settings: PooledSettings

    def examples(self) -> dict[str, list[str]]:
        """The digests of the examples of each label."""
        return {
            label: [self.digests[row] for row in np.flatnonzero(self.classes == number)]
            for number, label in enumerate(self.labels)
        }

    def of(self, label: str) -> NDArray[np.float32]:
        """The vectors of a label."""
        found: NDArray[np.float32] = self.vectors[self.classes == self.labels.index(label)]
        return found

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Everything as arrays, for a file."""
        names = json.dumps({"labels": self.labels, "digests": self.digests}).encode()
        return {
            "names": np.frombuffer(names, np.uint8),
            "classes": self.classes,
            "vectors": self.vectors,
            **_kept(self.memory),
            "settings": _text(self.settings),
        }

    @classmethod
    def from_arrays(cls, arrays: Arrays) -> TaughtLesson:
        """The lesson of `to_arrays`; raises a KeyError or a ValueError if it is not complete."""
        names = json.loads(arrays["names"].tobytes())
        labels, digests = (tuple(map(str, names[key])) for key in ("labels", "digests"))
        classes, vectors = arrays["classes"].astype(np.int64), arrays["vectors"].astype(np.float32)
        if vectors.ndim != 2 or not len(vectors) == len(classes) == len(digests):
            raise ValueError(f"lesson: {len(digests)} names and {len(classes)} classes of vectors {vectors.shape}")
        if len(np.unique(classes)) != len(labels) or not ((classes >= 0) & (classes < len(labels))).all():
            raise ValueError(f"lesson: classes {np.unique(classes).tolist()} of {len(labels)} labels")
        return cls(labels, classes, vectors, digests, _memory(arrays), _settings(arrays))


def taught_examples(folder: Path, lessons: int) -> dict[str, str]:
    """digest -> label of everything that was taught, without reading any vector."""
    found: dict[str, str] = {}
    for number in range(lessons):
        with (folder / lesson_name(number)).open("rb") as file:
            stored = read_arrays(file, only=("names", "classes"))
        names, classes = json.loads(stored["names"].tobytes()), stored["classes"]
        found |= {
            digest: names["labels"][place] for digest, place in zip(names["digests"], classes.tolist(), strict=True)
        }
    return found


def run_images(folder: Path, labels: Sequence[str]) -> dict[str, int]:
    """label -> images that the run has learned it from, of the classes of the run, which are the first of the `labels`.

    Reads no vector."""
    with (folder / STATISTICS).open("rb") as file:
        counts = read_arrays(file, only=("counts",))["counts"]
    return dict(zip(labels, map(int, counts), strict=False))


def archive(arrays: Arrays) -> bytes:
    """An .npz archive: the same arrays give the same bytes."""
    stored = io.BytesIO()
    contents: dict[str, Any] = dict(arrays)
    np.savez(stored, **contents)
    return stored.getvalue()


def joined(parts: Sequence[NDArray[np.float32]], dim: int) -> NDArray[np.float32]:
    """All vectors [n, dim] of several arrays."""
    return np.concatenate([np.empty((0, dim), np.float32), *parts])


def _kept(memory: ChoiceMemory) -> dict[str, NDArray[Any]]:
    return {MEMORY + name: values for name, values in memory.to_arrays().items()}


def _memory(arrays: Arrays) -> ChoiceMemory:
    return ChoiceMemory.from_arrays(
        {name.removeprefix(MEMORY): values for name, values in arrays.items() if name.startswith(MEMORY)}
    )


def _text(settings: PooledSettings) -> NDArray[np.uint8]:
    return np.frombuffer(settings.model_dump_json().encode(), dtype=np.uint8)


def _settings(arrays: Arrays) -> PooledSettings:
    return PooledSettings.model_validate_json(arrays["settings"].tobytes())
