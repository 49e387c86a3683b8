"""The quarantine: rows in SQLite or PostgreSQL, image files beside them; any number of processes may share it."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from types import EllipsisType
from typing import Any

import numpy as np
from sqlalchemy import ColumnElement, Connection, delete, select

from serving.quarantine import labels
from serving.quarantine.caps import excess, held
from serving.quarantine.database import Database
from serving.quarantine.images import images_at, is_whole
from serving.quarantine.intake import Intake
from serving.quarantine.records import (
    Added,
    Arrival,
    Caps,
    Change,
    Group,
    Grouping,
    Held,
    Item,
    Kind,
    State,
    StoreError,
    UnavailableError,
    UnknownIdError,
)
from serving.quarantine.schema import changes, items

UNOWNED_FOR = 3600.0
"""Seconds before a file without a row is taken for one that was left behind."""

_AT_ONCE = 500

log = logging.getLogger("bentoml.openworld")

_ITEM_COLUMNS = [column for column in items.c if column.name not in ("sha256", "file", "fingerprint", "bytes")]


class Store:
    """Thread-safe. Connects at the first use."""

    def __init__(self, url: str, images: str | None = None) -> None:
        self._database = Database(url)
        if images is None:
            if self._database.file is None:
                raise StoreError(
                    f"{self._database.name}: no place for the images; allowed: a folder or a URL of fsspec"
                )
            images = str(self._database.file.parent / "images")
        self._images = images_at(images)
        self._intake = Intake(self._database, self._images)

    @classmethod
    def open(cls, url: str, images: str | None = None) -> Store:
        """Connect now, and make the tables or check them."""
        store = cls(url, images)
        store.held()
        return store

    def close(self) -> None:
        self._database.close()

    # ---- items

    def add(self, arrivals: Sequence[Arrival]) -> Added:
        """Keep images, or count them where the same is there already; when it returns, that is durable."""
        return self._intake.add(arrivals)

    def items(
        self,
        *,
        ids: Sequence[int] | None = None,
        group: int | EllipsisType | None = ...,
        state: State | None = None,
        kind: Kind | None = None,
        after: int = 0,
        limit: int | None = None,
    ) -> list[Item]:
        """In the order of their ids; `group=None` means those in no group."""
        wanted: list[ColumnElement[bool]] = [items.c.id > after]
        if not isinstance(group, EllipsisType):
            wanted.append(items.c.group.is_(None) if group is None else items.c.group == group)
        if state is not None:
            wanted.append(items.c.state == state)
        if kind is not None:
            wanted.append(items.c.kind == kind)
        query = select(*_ITEM_COLUMNS).where(*wanted).order_by(items.c.id).limit(limit)
        with self._database.reading() as connection:
            if ids is None:
                return [_item(row) for row in connection.execute(query)]
            found: list[Item] = []
            for some in labels.chunks(sorted(set(ids))):
                found += [_item(row) for row in connection.execute(query.where(items.c.id.in_(some)))]
            return found[:limit]

    def image(self, item_id: int) -> bytes:
        """The file as it was sent."""
        with self._database.reading() as connection:
            file = connection.execute(select(items.c.file).where(items.c.id == item_id)).scalar()
        if file is None:
            raise UnknownIdError(f"no item {item_id}")
        content = self._images.read(file)
        if not is_whole(file, content):
            raise StoreError(f"the image file of item {item_id} is damaged: its SHA-256 is not that of {file}")
        return content

    def held(self) -> Held:
        with self._database.reading() as connection:
            return held(connection)

    # ---- deletion

    def delete(self, ids: Sequence[int], who: str | None = None) -> int:
        """Items and their files; how many of them there were."""
        with self._database.writing() as connection:
            files = _delete_rows(connection, ids)
            if who is not None and files:
                labels.note(connection, who, "delete", len(files))
        self._deleted(ids, files)
        return len(files)

    def delete_all(self, who: str | None = None) -> int:
        """Everything but the list of who did what."""
        with self._database.reading() as connection:
            ids = connection.execute(select(items.c.id)).scalars().all()
        return self.delete(ids, who)

    def enforce(self, caps: Caps) -> dict[str, int]:
        """Delete what is too old, too many or too much; how many went for which reason."""
        with self._database.reading() as connection:
            self._intake.tidy(held(connection).items)
            if not excess(connection, caps):
                return {}
        with self._database.writing() as connection:
            gone = excess(connection, caps)
            ids = [item_id for some in gone.values() for item_id in some]
            files = _delete_rows(connection, ids)
        self._deleted(ids, files)
        return {reason: len(some) for reason, some in gone.items()}

    def sweep(self, unowned_for: float = UNOWNED_FOR) -> int:
        """Remove files that no row names: what a killed process, or a deletion without the disk, left behind."""
        left = 0
        names = list(self._images.old(self._database.mark(), unowned_for))
        for start in range(0, len(names), _AT_ONCE):
            some = names[start : start + _AT_ONCE]
            with self._database.reading() as connection:
                owned = set(connection.execute(select(items.c.file).where(items.c.file.in_(some))).scalars())
            unowned = [name for name in some if name not in owned]
            self._images.remove(unowned)
            left += len(unowned)
        return left

    def _deleted(self, ids: Sequence[int], files: Sequence[str]) -> None:
        self._intake.forget(ids)
        try:
            self._images.remove(files)
        except UnavailableError as error:
            log.warning("%d deleted images still have files, to be swept later: %s", len(files), error)

    # ---- groups

    def replace_groups(self, groups: Sequence[Grouping]) -> None:
        """What training.discover found: new items leave their groups, labelled ones keep label and group."""
        with self._database.writing() as connection:
            labels.replace_groups(connection, groups)

    def groups(self) -> list[Group]:
        """Those with new items first, each in the order in which they were found."""
        with self._database.reading() as connection:
            return labels.all_groups(connection)

    def members(self, group: int) -> dict[int, State]:
        """Ids and states of a group's items; without all else, however many they are."""
        with self._database.reading() as connection:
            return labels.members(connection, group)

    def move(self, ids: Sequence[int], group: int | None, who: str) -> None:
        """Into a group, or out of every group."""
        with self._database.writing() as connection:
            labels.move(connection, ids, group, who)

    def merge(self, groups: Sequence[int], who: str) -> int:
        """Into the first of them, which is returned."""
        with self._database.writing() as connection:
            return labels.merge(connection, groups, who)

    # ---- labels

    def name(self, ids: Sequence[int], label: str, who: str) -> None:
        """They show a new class."""
        self._label(ids, "named", labels.checked_label(label), who)

    def mark_known(self, ids: Sequence[int], label: str, who: str) -> None:
        """They show a class that the model has."""
        self._label(ids, "known", labels.checked_label(label), who)

    def mark_junk(self, ids: Sequence[int], who: str) -> None:
        """They are of no use."""
        self._label(ids, "junk", None, who)

    def clear(self, ids: Sequence[int], who: str) -> None:
        """As if nobody had looked at them."""
        self._label(ids, "new", None, who)

    def _label(self, ids: Sequence[int], state: State, label: str | None, who: str) -> None:
        with self._database.writing() as connection:
            labels.label_items(connection, ids, state, label, who)

    def changes(self, limit: int = 100) -> list[Change]:
        """Who did what, the latest first."""
        with self._database.reading() as connection:
            columns = [changes.c[name] for name in Change._fields]
            rows = connection.execute(select(*columns).order_by(changes.c.id.desc()).limit(limit))
            return [Change(*row) for row in rows]

    # ---- learning

    def labelled(self) -> dict[str, list[Item]]:
        """Items named as new classes and not learned yet, by label."""
        found: dict[str, list[Item]] = {}
        for item in self.items(state="named"):
            found.setdefault(item.label or "", []).append(item)
        return dict(sorted(found.items()))

    def count_labelled(self) -> dict[str, int]:
        """How many `labelled` would give, by label."""
        with self._database.reading() as connection:
            return labels.count_named(connection)

    def mark_learned(self, learned: Mapping[str, Sequence[int]], version: str) -> int:
        """{label: ids} that a model learned; those that were renamed, cleared or deleted meanwhile are left alone."""
        with self._database.writing() as connection:
            return labels.mark_learned(connection, learned, version)


def _delete_rows(connection: Connection, ids: Sequence[int]) -> list[str]:
    """The names of their files, which are still there."""
    files: list[str] = []
    for some in labels.chunks(list(ids)):
        files += connection.execute(delete(items).where(items.c.id.in_(some)).returning(items.c.file)).scalars()
    labels.remove_empty_groups(connection)
    return files


def _item(row: Any) -> Item:
    values = dict(row._mapping)
    answer, features = json.loads(values.pop("answer")), values.pop("features")
    return Item(**values, answer=answer, features=np.frombuffer(features, dtype="<f4").astype(np.float32))
