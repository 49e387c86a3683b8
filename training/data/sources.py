"""The images of every lesson of a run, from wherever they are."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from training.config import Lesson, RunConfig
from training.data.datasets import kind_of, load_source
from training.data.images import DataError, Images, Source, join
from training.data.quarantined import QUARANTINE, Address, load_unknowns

if TYPE_CHECKING:
    from training.data.encoder import Encoder
    from training.data.image_encoder import View


class Sources:
    """Each source is read once, when it is first needed; a missing source is an error only where it is needed."""

    def __init__(
        self,
        config: RunConfig,
        data: str | None = None,
        quarantine: Address | None = None,
        encoder: "Encoder | None" = None,
    ) -> None:
        """`data` replaces the folder of every lesson whose classes it has.

        `quarantine` replaces that of the last lesson, and adds the password to others with the same address. `encoder`
        is that of the run's trunk, if it has one.
        """
        self.config = config
        self._encoder = encoder
        self._moved = data
        self._quarantine = quarantine
        self._read: dict[tuple[str, str | None, tuple[str, ...] | None], Source] = {}

    def keep(self, lesson: Lesson, source: Source) -> None:
        """Use images of a lesson that were read before."""
        self._once(lesson, lambda _: source)

    def of(self, lesson: Lesson) -> Source:
        """The images of a lesson; raises a DataError with the reason if there are none."""
        if lesson.dataset == QUARANTINE:
            return self._once(lesson, self._load_unknowns)
        if self._moved is not None:
            kind = kind_of(self.config.preset.dataset, self._moved)
            elsewhere = self._once(replace(lesson, dataset=kind, data=self._moved), self._load)
            if set(lesson.labels) <= set(elsewhere.classes):
                return elsewhere
        return self._once(lesson, self._load)

    def read(self, name: str, data: str | None) -> Source:
        """Another data set, read in the same way as the images of the run."""
        return load_source(name, self.config.preset.image, data, self._encoder)

    def views(self, images: Images, view: "View", name: str | None = None) -> Images:
        """Images of a run with a trunk in another view; see `Encoder.views`."""
        if self._encoder is None:
            raise DataError("views of images need a trunk, and this run has none")
        return self._encoder.views(images, view, name)

    def test_images(self) -> tuple[Source, list[str]]:
        """The test images of all lessons that are available, and the reasons why others are not."""
        found: list[tuple[Lesson, Source]] = []
        missing = []
        for lesson in self.config.lessons:
            try:
                source = self.of(lesson)
                if not len(source.test.of(lesson.labels)):
                    raise DataError("no image is left")
                found.append((lesson, source))
            except DataError as error:
                missing.append(f"no test images of {', '.join(lesson.labels)}: {error}")
        if not found:
            raise DataError("; ".join(missing))
        return _joint(self.config, found), missing

    def _once(self, lesson: Lesson, load: Callable[[Lesson], Source]) -> Source:
        key = (lesson.dataset, lesson.data, lesson.labels if lesson.dataset == QUARANTINE else None)
        if key not in self._read:
            self._read[key] = load(lesson)
        return self._read[key]

    def _load(self, lesson: Lesson) -> Source:
        return self.read(lesson.dataset, lesson.data)

    def _load_unknowns(self, lesson: Lesson) -> Source:
        given = self._quarantine
        applies = given is not None and (lesson == self.config.lessons[-1] or lesson.data == given.public)
        return load_unknowns(lesson, self.config, given if applies else None, self._encoder)


def _joint(config: RunConfig, found: list[tuple[Lesson, Source]]) -> Source:
    """The classes of every lesson from its own source, and from each source the classes that no lesson has.

    An image that several sources have counts once.
    """
    tests = [source.test.of(lesson.labels) for lesson, source in found]
    seen: list[Source] = []
    counted: set[bytes] = set()
    classes = [label for lesson, _ in found for label in lesson.labels]
    for _, source in found:
        if all(source is not other for other in seen):
            seen.append(source)
            every = (*source.classes, *source.never_taught)
            unlearned = [label for label in every if label not in config.labels]
            images = source.test.of(unlearned)
            contents = [pixels.tobytes() for pixels in images.pixels]
            tests.append(images.at(np.array([i for i, each in enumerate(contents) if each not in counted], dtype=int)))
            counted |= set(contents)
            classes += [label for label in unlearned if label not in classes]
    return Source(found[0][1].train, join(tests), tuple(classes))
