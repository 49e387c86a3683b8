"""The labelled images of a quarantine, as images to learn from: `openworld learn-unknowns`."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from serving.bundle.pixels import ANY_SIZE, open_image
from serving.quarantine import configured_address
from serving.quarantine.records import StoreError, UnavailableError, UnknownIdError
from training.config import Lesson, RunConfig
from training.data.images import DataError, Images, Source
from training.data.reader import PixelReader, Reader

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy.engine import URL

    from serving.quarantine.store import Store

QUARANTINE = "quarantine"
EXAMPLE = "sqlite:////var/lib/openworld/quarantine.db"
MIN_IMAGES, LEAST_IMAGES = 20, 5
"""Images that a class needs by default, and the smallest number that may be chosen."""
TEST_SHARE = 0.2

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Address:
    """The address of a quarantine: its database, and its image files if they are not next to it."""

    url: str
    images: str | None = None

    @classmethod
    def from_environment(cls) -> Address | None:
        """The quarantine that the OPENWORLD_* variables name, if any."""
        try:
            found = configured_address()
        except StoreError as error:
            raise DataError(str(error)) from None
        return cls(*found) if found else None

    @property
    def public(self) -> str:
        """The URL for files and logs: without the password, and with an absolute path."""
        from sqlalchemy.engine import URL

        url = self._parsed()
        file = self._file()
        # Built from the public parts, because `URL.set` keeps a password that is set to None.
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
        """The store, closed at the end; its errors become DataErrors."""
        from serving.quarantine.store import Store

        file = self._file()
        if file is not None and not file.is_file():
            raise DataError(f"quarantine {self.public}: no such file; a server creates it with its first unknown image")
        try:
            with closing(Store.open(self.url, self.images)) as store:
                yield store
        except StoreError as error:
            raise DataError(f"quarantine {self.public}: {error}") from error

    def _parsed(self) -> URL:
        from sqlalchemy.engine import make_url
        from sqlalchemy.exc import ArgumentError

        try:
            return make_url(self.url)
        except (ArgumentError, ValueError):
            # The text is not shown, because it may contain a password.
            raise DataError(f"quarantine: not a URL; allowed: such as {EXAMPLE}") from None

    def _file(self) -> Path | None:
        url = self._parsed()
        return Path(url.database).resolve() if url.get_backend_name() == "sqlite" and url.database else None


def choose_unknowns(
    labelled: Mapping[str, Sequence[int]], config: RunConfig, minimum: int
) -> dict[str, tuple[int, ...]]:
    """The classes to learn next, with the ids of their images; {} if the run has learned all labelled images."""
    learned = {number for lesson in config.lessons for numbers in lesson.items.values() for number in numbers}
    fresh = {label: tuple(n for n in numbers if n not in learned) for label, numbers in labelled.items()}
    fresh = {label: numbers for label, numbers in fresh.items() if numbers}
    if labelled and not fresh:
        return {}
    ready = {}
    reasons = []
    for label, numbers in sorted(fresh.items()):
        if label in config.labels:
            reasons.append(f"{label!r} is already learned (mark its {len(numbers)} images as known)")
        elif len(numbers) < minimum:
            reasons.append(f"{label!r} has {len(numbers)} images of the {minimum} that a class needs")
        else:
            ready[label] = numbers
    if not ready:
        there = "; ".join(reasons) or "no image is labelled as a new class"
        raise DataError(
            f"nothing to learn yet: {there}. Group the quarantine with `openworld discover`, name the groups "
            "on the page /unknowns, or lower --min-images"
        )
    for reason in reasons:
        log.warning("left for later: %s", reason)
    return ready


def load_unknowns(
    lesson: Lesson, config: RunConfig, given: Address | None = None, encoder: Reader | None = None
) -> Source:
    """The images of a lesson from its quarantine, decoded as the server decodes them, and encoded by an encoder.

    The split into training, validation and test depends on their ids alone, so a deleted image moves no other one.
    """
    address = given or address_of(lesson)
    parts: tuple[list[tuple[str, int]], ...] = ([], [], [])
    for label, numbers in lesson.items.items():
        for part, chosen in zip(parts, _split(numbers, config), strict=True):
            part.extend((label, number) for number in chosen)
    reader = encoder or PixelReader(config.preset.image)
    with address.opened() as store:
        shared = _OpenStore(store)
        train, validation, test = (_read(address, shared, part, reader) for part in parts)
        shared.store = None
    whole = sum(map(len, lesson.items.values()))
    if lost := whole - len(train) - len(validation) - len(test):
        log.warning("quarantine: %d of the %d images of %s no longer exist", lost, whole, ", ".join(lesson.labels))
    for images in (train, validation):
        if empty := sorted(set(lesson.labels) - set(images.labels.tolist())):
            raise DataError(f"quarantine {address.public}: too few images left of {', '.join(empty)}")
    return Source(train, test, lesson.labels, validation)


def address_of(lesson: Lesson) -> Address:
    """The quarantine of a lesson. Its password is not stored in the run, but the environment may have it."""
    recorded = Address(lesson.data or "", lesson.images)
    here = Address.from_environment()
    return here if here is not None and here.public == recorded.public else recorded


def _split(numbers: Sequence[int], config: RunConfig) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
    """Ids for training, validation and test; at least one each."""
    shuffled = np.random.default_rng(config.seed).permutation(np.sort(numbers)).tolist()
    tests = max(1, round(TEST_SHARE * len(shuffled)))
    validations = max(1, round(config.preset.validation_share * (len(shuffled) - tests)))
    return shuffled[tests + validations :], shuffled[tests : tests + validations], shuffled[:tests]


def read_items(address: Address, chosen: Iterable[tuple[str, int]], reader: Reader) -> Images:
    """The images with these labels and ids that can be read, in the order of both."""
    with address.opened() as store:
        shared = _OpenStore(store)
        images = _read(address, shared, chosen, reader)
        shared.store = None
    return images


def _read(address: Address, store: _OpenStore, chosen: Iterable[tuple[str, int]], reader: Reader) -> Images:
    ordered = sorted(chosen)
    originals = [StoredOriginal(address, number, store) for _, number in ordered]
    read = reader.read(originals, [label for label, _ in ordered])
    for name, reason in read.unreadable:
        if reason != GONE:
            log.warning("skipped %s: %s", name, reason)
    return read.images


GONE = "it no longer exists"


@dataclass
class _OpenStore:
    """A store that originals share while many of them are read; None afterwards, and on another machine."""

    store: Store | None

    def __reduce__(self) -> tuple[type[_OpenStore], tuple[None]]:
        return _OpenStore, (None,)


@dataclass(frozen=True, slots=True)
class StoredOriginal:
    """An image of a quarantine."""

    address: Address
    number: int
    shared: _OpenStore

    @property
    def name(self) -> str:
        return f"image {self.number} of the quarantine"

    def stamp(self) -> bytes | None:
        return None  # numbers are reused if the database is created again

    def content(self) -> bytes:
        if self.shared.store is not None:
            return self._from(self.shared.store)
        with self.address.opened() as store:
            return self._from(store)

    def image(self, content: bytes) -> Image.Image:
        return open_image(content, ANY_SIZE)

    def _from(self, store: Store) -> bytes:
        try:
            return store.image(self.number)
        except UnavailableError:
            raise
        except UnknownIdError:
            raise FileNotFoundError(GONE) from None
        except StoreError as error:
            raise OSError(str(error)) from error
