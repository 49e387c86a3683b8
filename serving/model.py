"""A model for programs: answer images, teach classes from a few files, forget them, save the result.

    model = Model.load("bundle")
    model.teach({"cow": ["cow1.jpg", "cow2.jpg", "cow3.jpg"]})
    print(model.predict("photo.jpg").label)
    model.save("with-cows")

It needs what a server needs, and no more: no torch, no GPU, no training code.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from serving.bundle import model as served
from serving.bundle.errors import ImageError
from serving.bundle.labels import alike_but_for_case, plain, same_label
from serving.bundle.layout import MANIFEST
from serving.bundle.pixels import open_image, to_pixels
from serving.errors import refused_image
from serving.given_images import EXAMPLE, Picture, content_of, images_of, name_of
from serving.http.schemas import Answer
from serving.inference.answers import PredictionOptions, answer_image
from serving.teaching.curriculum import Curriculum, Examples
from serving.teaching.errors import TeachError
from serving.teaching.learning import learn
from serving.teaching.trial import taught_verdicts
from serving.teaching.writing import Written, compose, write

BATCH = 16
"""Images that are encoded at a time."""


class Model:
    """A bundle that answers, and learns if it has a trunk. A change makes another version; files never change."""

    def __init__(self, model: served.BundleModel) -> None:
        self._on_disk = model
        self._model = model
        self._curriculum: Curriculum | None = None
        """Read from the bundle when it is needed."""
        self._written: Written | None = None
        """What `save` writes; None while the bundle on disk is the model."""

    @classmethod
    def load(cls, bundle: str | os.PathLike[str], *, threads: int = 0) -> Model:
        """Read a bundle, or the current one of a shelf, and check that it reproduces its golden answers."""
        folder = Path(bundle)
        current = folder / "current"
        model = served.BundleModel.load(
            current if current.is_dir() else folder, provider="cpu", precision="fp32", threads=threads
        )
        model.self_test()
        return cls(model)

    @property
    def version(self) -> str:
        return self._model.manifest.version

    @property
    def labels(self) -> tuple[str, ...]:
        """All classes."""
        return self._model.manifest.labels

    def predict(self, image: Picture, *, top: int | None = None) -> Answer:
        """The class of an image, or that it is unknown; raises a RequestError if it cannot be read."""
        return answer_image(self._model, content_of(image), PredictionOptions.for_model(self._model, top=top))

    def teach(self, examples: Mapping[str, Iterable[Picture]], *, who: str = "program") -> None:
        """Learn from images by label: new classes, or more of classes that are known.

        An image that was taught before is not taught twice; under another label, it moves there, as on a server.
        Raises a TeachError, or a RequestError if an image cannot be read; the model stays as it is then.
        """
        curriculum = self._need_curriculum()
        labels, contents = self._given(examples)
        vectors = dict(zip(contents, self._encode(contents.values()), strict=True))
        by_label: dict[str, list[tuple[str, NDArray[np.float32]]]] = {}
        for digest, label in labels.items():
            by_label.setdefault(label, []).append((digest, vectors[digest]))
        known = curriculum.examples()
        if moved := frozenset(digest for digest, label in labels.items() if known.get(digest, label) != label):
            curriculum = curriculum.without_examples(moved)
        lesson = Examples.of(by_label, who, datetime.now(UTC).isoformat(timespec="seconds"))
        self._become(curriculum.taught(lesson))

    def forget(self, label: str) -> None:
        """Take a class out, as if it had never been learned."""
        self._become(self._need_curriculum().forgot(self._existing(label)))

    def rename(self, label: str, new: str) -> None:
        """Give a class another name."""
        label, new = self._existing(label), plain(new)
        if same_label(new, [other for other in self.labels if other != label]) is not None:
            raise TeachError(f"{new!r} is a class already; allowed: a new name, or to merge the classes")
        self._become(self._need_curriculum().renamed(label, new))

    def merge(self, label: str, into: str) -> None:
        """Make the examples of a taught class examples of another one."""
        self._become(self._need_curriculum().merged(self._existing(label), self._existing(into)))

    def _given(self, examples: Mapping[str, Iterable[Picture]]) -> tuple[dict[str, str], dict[str, bytes]]:
        """The label and the content of each image, by the digest of its content."""
        if not isinstance(examples, Mapping) or not examples:
            got = "nothing" if isinstance(examples, Mapping) else f"a value of type {type(examples).__name__}"
            raise TeachError(f"examples are {got}; allowed: images by label, as in {EXAMPLE}")
        labels: dict[str, str] = {}
        names: dict[str, str] = {}
        contents: dict[str, bytes] = {}
        for text, given in examples.items():
            label = self._label_to_teach(text, {*labels.values()})
            for number, image in enumerate(images_of(label, given)):
                content = content_of(image)
                digest, name = hashlib.sha256(content).hexdigest(), name_of(image, number)
                first = names.setdefault(digest, name)
                if labels.setdefault(digest, label) != label:
                    which = f"{first} of {labels[digest]!r}, which is also {name} of {label!r},"
                    raise TeachError(f"{which} has two labels; allowed: one label per image")
                contents[digest] = content
        return labels, contents

    def _existing(self, text: str) -> str:
        """The class that a person means by this text, as it is spelled; the text itself if there is none."""
        return same_label(text, self.labels) or text

    def _label_to_teach(self, text: str, also: Iterable[str]) -> str:
        """The class that a person means: one that exists or is in the same lesson, or else a new one."""
        if not isinstance(text, str):
            raise TeachError(f"label is of type {type(text).__name__}; allowed: a text, as in {EXAMPLE}")
        known = (*self.labels, *also)
        if (existing := same_label(text, known)) is not None:
            return existing
        if (close := alike_but_for_case(text, known)) is not None:
            raise TeachError(
                f"label is {text!r}, which differs from the class {close!r} in upper and lower case only; allowed: "
                f"{close!r}, or another name"
            )
        return plain(text)

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write the model as a bundle, to a folder that does not exist or is empty: complete, or not at all."""
        place = Path(folder)
        if place.exists() and (not place.is_dir() or any(place.iterdir())):
            raise TeachError(f"{place} exists; allowed: a folder that does not exist, or an empty one")
        bundle = self._on_disk.bundle
        if self._written is None:
            everything = {name: name for name in (*bundle.manifest.files, MANIFEST)}
            write(Written(bundle.manifest, {}, everything), bundle, place)
        else:
            write(self._written, bundle, place)
        return place

    def _need_curriculum(self) -> Curriculum:
        if self._curriculum is None:
            self._curriculum = Curriculum.of(self._on_disk.bundle)
        return self._curriculum

    def _become(self, curriculum: Curriculum) -> None:
        """Learn, and answer by what was learned from now on."""
        before = self._on_disk
        knowledge = learn(curriculum)
        written = compose(before, knowledge, taught_verdicts(knowledge))
        bundle = replace(before.bundle, manifest=written.manifest, rule=knowledge.rule(before.bundle.rule))
        self._model = replace(before, bundle=bundle, pooled=knowledge.model)
        self._curriculum, self._written = knowledge.learned_curriculum, written

    def _encode(self, contents: Iterable[bytes]) -> NDArray[np.float32]:
        if self._model.manifest.trunk is None:
            raise TeachError("the bundle has no trunk; allowed: a bundle of photos, whose classes are statistics")
        try:
            pixels = [to_pixels(open_image(content), self._model.manifest.image) for content in contents]
        except ImageError as error:
            raise refused_image(error) from error
        starts = range(0, len(pixels), BATCH)
        return np.concatenate([self._model.encode(np.stack(pixels[start : start + BATCH])) for start in starts])
