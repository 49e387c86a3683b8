"""What people have named in the quarantine, as images to learn from: `--add-unknowns`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from serving.bundle import ImageSpec
from serving.errors import RequestError
from serving.preprocess import Limits, decode, to_pixels
from serving.quarantine import StoreError, UnavailableError, UnknownIdError
from serving.settings import PREFIX, Settings, SettingsError
from training.config import Lesson, RunConfig
from training.images import DataError, Images, Source

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy.engine import URL

    from serving.quarantine.store import Store

QUARANTINE = "quarantine"
EXAMPLE = "sqlite:////var/lib/openworld/quarantine.db"
MIN_IMAGES, LEAST_IMAGES = 20, 5
"""How many images a class needs unless it is said otherwise, and the least that may be said."""
TEST_SHARE = 0.2
ACCEPTED = Limits(size=sys.maxsize, pixels=sys.maxsize)
"""The server let these images in, under limits of its own."""

Items = dict[str, tuple[int, ...]]
"""The images of each class by their numbers in the quarantine."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Address:
    """Where a quarantine is: its database, and its image files if they are not beside it."""

    url: str
    images: str | None = None

    @classmethod
    def from_environment(cls) -> Address | None:
        """The one that a server with these settings keeps."""
        try:
            settings = Settings.from_environment()
        except SettingsError as error:
            raise DataError(str(error)) from None
        return cls(settings.quarantine_url, settings.quarantine_images) if settings.quarantine_url else None

    def variables(self) -> dict[str, str]:
        """The settings that name it, for another process."""
        named = {"QUARANTINE_URL": self.url, "QUARANTINE_IMAGES": self.images}
        return {PREFIX + name: value for name, value in named.items() if value}

    @property
    def public(self) -> str:
        """The URL as it may be written down: without the password, and true from any directory."""
        from sqlalchemy.engine import URL

        url = self._parsed()
        file = self._file()
        # Built anew from what may be shown; `URL.set` would keep a password that is set to None.
        shown = URL.create(
            url.drivername,
            username=url.username,
            host=url.host,
            port=url.port,
            database=url.database if file is None else str(file),
            query={name: value for name, value in url.query.items() if "password" not in name.lower()},
        )
        return shown.render_as_string(hide_password=False)

    @contextmanager
    def opened(self) -> Iterator[Store]:
        """The store, closed at the end; what goes wrong with it is a DataError."""
        from serving.quarantine.store import Store

        file = self._file()
        if file is not None and not file.is_file():
            raise DataError(f"quarantine {self.public}: no such file; a server makes it when it keeps its first image")
        try:
            store = Store.open(self.url, self.images)
            try:
                yield store
            finally:
                store.close()
        except StoreError as error:
            raise DataError(f"quarantine {self.public}: {error}") from error

    def _parsed(self) -> URL:
        from sqlalchemy.engine import make_url
        from sqlalchemy.exc import ArgumentError

        try:
            return make_url(self.url)
        except (ArgumentError, ValueError):
            # What cannot be read may still hold a password.
            raise DataError(
                "quarantine: not a URL; allowed: such as sqlite:////var/lib/openworld/quarantine.db"
            ) from None

    def _file(self) -> Path | None:
        url = self._parsed()
        return Path(url.database).resolve() if url.get_backend_name() == "sqlite" and url.database else None


def choose_unknowns(
    labelled: Mapping[str, Sequence[int]], config: RunConfig, minimum: int
) -> dict[str, tuple[int, ...]]:
    """The classes to learn next, with the numbers of their images; {} if the run has learned all that is named."""
    learned = {number for lesson in config.lessons for numbers in lesson.items.values() for number in numbers}
    fresh = {label: tuple(n for n in numbers if n not in learned) for label, numbers in labelled.items()}
    fresh = {label: numbers for label, numbers in fresh.items() if numbers}
    if labelled and not fresh:
        return {}
    ready = {}
    reasons = []
    for label, numbers in sorted(fresh.items()):
        if label in config.labels:
            reasons.append(f"{label!r} is learned already (mark its {len(numbers)} images as known)")
        elif len(numbers) < minimum:
            reasons.append(f"{label!r} has {len(numbers)} images of the {minimum} that a class needs")
        else:
            ready[label] = numbers
    if not ready:
        there = "; ".join(reasons) or "no image is named as a new class"
        raise DataError(
            f"nothing to learn yet: {there}. Group the quarantine with `python -m training.discover`, name the groups "
            "on the page /unknowns, or lower --min-images"
        )
    for reason in reasons:
        log.warning("left for later: %s", reason)
    return ready


def load_unknowns(lesson: Lesson, config: RunConfig, given: Address | None = None) -> Source:
    """The images of a lesson from its quarantine, decoded as the server decodes them.

    Which of them train, validate and test is settled by their numbers, so that one that was deleted moves no other.
    """
    address = given or address_of(lesson)
    parts: tuple[list[tuple[str, int]], ...] = ([], [], [])
    for label, numbers in lesson.items.items():
        for part, chosen in zip(parts, _deal(numbers, config), strict=True):
            part.extend((label, number) for number in chosen)
    with address.opened() as store:
        train, validation, test = (_read(store, part, config.preset.image) for part in parts)
    whole = sum(map(len, lesson.items.values()))
    if lost := whole - len(train) - len(validation) - len(test):
        log.warning("quarantine: %d of the %d images of %s are gone", lost, whole, ", ".join(lesson.labels))
    for images in (train, validation):
        if empty := sorted(set(lesson.labels) - set(images.labels.tolist())):
            raise DataError(f"quarantine {address.public}: too few images left of {', '.join(empty)}")
    return Source(train, test, lesson.labels, validation)


def address_of(lesson: Lesson) -> Address:
    """Where the lesson's quarantine was; a password is not written down, but the environment may know it."""
    recorded = Address(lesson.data or "", lesson.images)
    here = Address.from_environment()
    return here if here is not None and here.public == recorded.public else recorded


def _deal(numbers: Sequence[int], config: RunConfig) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
    """Numbers to train with, to validate with and to test with; at least one each."""
    shuffled = np.random.default_rng(config.seed).permutation(np.sort(numbers)).tolist()
    tests = max(1, round(TEST_SHARE * len(shuffled)))
    validations = max(1, round(config.preset.validation_share * (len(shuffled) - tests)))
    return shuffled[tests + validations :], shuffled[tests : tests + validations], shuffled[:tests]


def _read(store: Store, chosen: Iterable[tuple[str, int]], spec: ImageSpec) -> Images:
    pixels, labels = [], []
    for label, number in sorted(chosen):
        try:
            pixels.append(to_pixels(decode(store.image(number), ACCEPTED), spec))
        except UnavailableError:
            raise
        except UnknownIdError:
            continue
        except (RequestError, StoreError) as error:
            log.warning("skipped image %d of the quarantine: %s", number, error)
            continue
        labels.append(label)
    if not pixels:
        return Images(np.empty((0, *spec.shape), np.uint8), np.empty(0, np.str_))
    return Images(np.stack(pixels), np.array(labels))
