"""The store of a quarantine: rows in SQLite or PostgreSQL and image files. Any number of processes may share it."""

from __future__ import annotations

from collections.abc import Sequence
from types import EllipsisType

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import ColumnElement, Connection, delete, select

from serving.quarantine.caps import excess, usage
from serving.quarantine.database import Database
from serving.quarantine.examples import TaughtItems
from serving.quarantine.images import is_intact, is_own_name, open_image_store
from serving.quarantine.intake import Intake
from serving.quarantine.labels import chunks, note, remove_empty_groups
from serving.quarantine.records import (
    Added,
    Arrival,
    Caps,
    DamagedItemError,
    Item,
    ItemKind,
    ItemState,
    Outlined,
    StoreError,
    UnavailableError,
    UnknownIdError,
    Usage,
)
from serving.quarantine.rows import item_of, outlined_of
from serving.quarantine.schema import items
from serving.telemetry import log

UNOWNED_FOR = 3600.0
"""Seconds after which a file without a row counts as left behind."""

_ITEM_COLUMNS = [column for column in items.c if column.name not in ("sha256", "fingerprint", "bytes")]


class Store(TaughtItems):
    """Items with their images, groups and labels. Thread-safe; connects at first use."""

    def __init__(self, url: str, images: str | None = None) -> None:
        super().__init__(Database(url))
        if images is None:
            if self._database.file is None:
                raise StoreError(
                    f"{self._database.name}: no image storage given; allowed: a folder, or a URL that fsspec knows"
                )
            images = str(self._database.file.parent / "images")
        self._images = open_image_store(images)
        self._intake = Intake(self._database, self._images)

    @classmethod
    def open(cls, url: str, images: str | None = None) -> Store:
        """Connect now, and create or check the tables."""
        store = cls(url, images)
        store.usage()
        return store

    def close(self) -> None:
        self._database.close()

    def add(self, arrivals: Sequence[Arrival]) -> Added:
        """Store images, or count them if they are duplicates; durable when this returns."""
        return self._intake.add(arrivals)

    def items(
        self,
        *,
        ids: Sequence[int] | None = None,
        group: int | EllipsisType | None = ...,
        state: ItemState | None = None,
        kind: ItemKind | None = None,
        after: int = 0,
        limit: int | None = None,
        latest: int | None = None,
    ) -> list[Item]:
        """Items in the order of their ids; `group=None` selects those without a group, `latest` the last ones."""
        wanted: list[ColumnElement[bool]] = [items.c.id > after]
        if not isinstance(group, EllipsisType):
            wanted.append(items.c.group.is_(None) if group is None else items.c.group == group)
        if state is not None:
            wanted.append(items.c.state == state)
        if kind is not None:
            wanted.append(items.c.kind == kind)
        if latest is not None:
            first = select(items.c.id).where(*wanted).order_by(items.c.id.desc()).limit(latest)
            wanted = [items.c.id.in_(first)]
        query = select(*_ITEM_COLUMNS).where(*wanted).order_by(items.c.id).limit(limit)
        mark = self._database.mark()
        with self._database.reading() as connection:
            if ids is None:
                return [item_of(row._asdict(), mark) for row in connection.execute(query)]
            found: list[Item] = []
            for some in chunks(sorted(set(ids))):
                rows = connection.execute(query.where(items.c.id.in_(some)))
                found += [item_of(row._asdict(), mark) for row in rows]
            return found[:limit]

    def outline(self) -> list[Outlined]:
        """Number, group, state and label of every item, without reading the rest of the rows."""
        query = select(items.c.id, items.c.group, items.c.state, items.c.label).order_by(items.c.id)
        with self._database.reading() as connection:
            return [outlined_of(row) for row in connection.execute(query)]

    def features(self, ids: Sequence[int]) -> dict[int, NDArray[np.float32]]:
        """The features of items by number; damaged ones are left out."""
        found: dict[int, NDArray[np.float32]] = {}
        with self._database.reading() as connection:
            for some in chunks(list(ids)):
                rows = connection.execute(select(items.c.id, items.c.features).where(items.c.id.in_(some)))
                for number, content in rows:
                    if isinstance(content, bytes) and len(content) % 4 == 0:
                        found[number] = np.frombuffer(content, dtype="<f4").astype(np.float32)
        return found

    def image(self, item_id: int) -> bytes:
        """The image file as it was received."""
        with self._database.reading() as connection:
            file = connection.execute(select(items.c.file).where(items.c.id == item_id)).scalar()
        if file is None:
            raise UnknownIdError(f"no item {item_id}")
        if not is_own_name(str(file), self._database.mark()):
            raise DamagedItemError(f"the row of item {item_id} names a file that is not of this quarantine")
        content = self._images.read(file)
        if not is_intact(file, content):
            raise DamagedItemError(f"the image file of item {item_id} is damaged: its SHA-256 is not that of {file}")
        return content

    def usage(self) -> Usage:
        with self._database.reading() as connection:
            return usage(connection)

    def delete(self, ids: Sequence[int], who: str | None = None) -> int:
        """Delete items and their files; how many there were."""
        with self._database.writing() as connection:
            files = _delete_rows(connection, ids)
            if who is not None and files:
                note(connection, who, "delete", len(files))
        self._remove_files(ids, files)
        return len(files)

    def delete_all(self, who: str | None = None) -> int:
        """Delete everything except the change log."""
        with self._database.reading() as connection:
            ids = connection.execute(select(items.c.id)).scalars().all()
        return self.delete(ids, who)

    def enforce(self, caps: Caps) -> dict[str, int]:
        """Delete items beyond the limits; the number of deleted items by limit."""
        with self._database.reading() as connection:
            self._intake.forget_if_stale(usage(connection).items)
            if not excess(connection, caps):
                return {}
        with self._database.writing() as connection:
            removed = excess(connection, caps)
            ids = [item_id for some in removed.values() for item_id in some]
            files = _delete_rows(connection, ids)
        self._remove_files(ids, files)
        return {reason: len(some) for reason, some in removed.items()}

    def sweep(self, unowned_for: float = UNOWNED_FOR) -> int:
        """Remove files that no row names, left behind by a killed process or while the disk was unavailable."""
        left = 0
        names = list(self._images.old(self._database.mark(), unowned_for))
        for some in chunks(names):
            with self._database.reading() as connection:
                owned = set(connection.execute(select(items.c.file).where(items.c.file.in_(some))).scalars())
            unowned = [name for name in some if name not in owned]
            self._images.remove(unowned)
            left += len(unowned)
        return left

    def _remove_files(self, ids: Sequence[int], files: Sequence[str]) -> None:
        self._intake.forget(ids)
        mark = self._database.mark()
        own = [name for name in files if is_own_name(str(name), mark)]
        if len(own) < len(files):
            log.warning("%d deleted rows named files that are not of this quarantine", len(files) - len(own))
        try:
            self._images.remove(own)
        except UnavailableError as error:
            log.warning("files of %d deleted images are left for the next sweep: %s", len(files), error)

    def labelled(self) -> dict[str, list[Item]]:
        """Items named as new classes and not learned yet, by label, without damaged ones."""
        found: dict[str, list[Item]] = {}
        for item in self.items(state="named"):
            if item.damage is not None:
                log.warning("item %d is left out: %s", item.id, item.damage)
                continue
            found.setdefault(item.label or "", []).append(item)
        return dict(sorted(found.items()))


def _delete_rows(connection: Connection, ids: Sequence[int]) -> list[str]:
    """Delete rows; returns the names of their files, which still exist."""
    files: list[str] = []
    for some in chunks(list(ids)):
        files += connection.execute(delete(items).where(items.c.id.in_(some)).returning(items.c.file)).scalars()
    remove_empty_groups(connection)
    return files
