"""Labelled items as examples that a server learns from, and classes that people have begun."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import Connection, delete, func, insert, select, update

from serving.quarantine.database import Database
from serving.quarantine.labels import LabelledItems, check_label, chunks, existing_ids, label_state, note, set_values
from serving.quarantine.records import Example, LabelError
from serving.quarantine.rows import example_of, is_text
from serving.quarantine.schema import drafts, items

LABELLED = ("named", "known")
_COLUMNS = (
    *(items.c.id, items.c.sha256, items.c.label, items.c.state),
    *(items.c.labelled_by, items.c.labelled_at, items.c.size),
)


class TaughtItems(LabelledItems):
    """What a lesson is made of. `known` are the classes of the served model; each method is one transaction."""

    @property
    def database(self) -> Database:
        return self._database

    def examples(self, label: str | None = None) -> list[Example]:
        """All labelled items, or those of a label, in the order of their ids."""
        query = select(*_COLUMNS).where(items.c.state.in_(LABELLED), items.c.label.is_not(None)).order_by(items.c.id)
        if label is not None:
            query = query.where(items.c.label == label)
        with self._database.reading() as connection:
            return _whole(connection.execute(query))

    def with_digests(self, digests: Sequence[str]) -> list[Example]:
        """The items of these image files, labelled or not."""
        found: list[Example] = []
        with self._database.reading() as connection:
            for some in chunks(list(digests)):
                rows = connection.execute(select(*_COLUMNS).where(items.c.sha256.in_(some)))
                found += _whole(rows)
        return found

    def count_new(self) -> int:
        """The number of unlabelled items."""
        with self._database.reading() as connection:
            counted = select(func.count()).select_from(items).where(items.c.state == "new")
            return int(connection.execute(counted).scalar_one())

    def new_since(self, latest: int) -> tuple[int, int]:
        """The number of unlabelled items with a larger id, and the largest id of all."""
        with self._database.reading() as connection:
            fresh = select(func.count()).select_from(items).where(items.c.state == "new", items.c.id > latest)
            newest = connection.execute(select(func.max(items.c.id))).scalar()
            return int(connection.execute(fresh).scalar_one()), int(newest or 0)

    def teach(self, ids: Sequence[int], label: str, known: Collection[str], who: str) -> None:
        """Label items as examples of a class, new or known; a learned label may be changed by this as well."""
        label = check_label(label, known)
        with self._database.writing() as connection:
            ids = existing_ids(connection, ids)
            state = label_state(label, known)
            set_values(connection, ids, state=state, label=label, labelled_by=who, labelled_at=time.time())
            note(connection, who, "teach", len(ids), label)

    def withdraw(self, ids: Sequence[int], who: str) -> None:
        """Make items no longer examples: they are marked as useless, so that the next lesson takes them out."""
        with self._database.writing() as connection:
            ids = existing_ids(connection, ids)
            set_values(connection, ids, state="junk", label=None, labelled_by=who, labelled_at=time.time())
            note(connection, who, "withdraw", len(ids))

    def relabel(self, names: Mapping[str, str], known: Collection[str], who: str) -> int:
        """Give all examples of some labels another one; how many there were."""
        checked = {label: check_label(new, known) for label, new in names.items()}
        with self._database.writing() as connection:
            return sum(_relabel(connection, label, new, known, who) for label, new in checked.items())

    def withdraw_class(self, label: str, who: str) -> list[int]:
        """Make all examples of a class unlabelled items; their ids."""
        with self._database.writing() as connection:
            return _withdraw_class(connection, label, who)

    def settle(self, known: Collection[str], version: str, who: str, what: str) -> None:
        """After a version was published: labels of its classes are known ones, all others are new."""
        with self._database.writing() as connection:
            _settle(connection, known, f"{version}: {what}", who)

    def go_back(
        self, taught: Mapping[str, str], people: Mapping[str, str], known: Collection[str], version: str, who: str
    ) -> None:
        """After a version is served again: the items that it was taught, digest -> label, get this label, noted as that
        of `people`, label -> names. All labels of its classes are known ones, all others are new."""
        with self._database.writing() as connection:
            for label, ids in _with_other_labels(connection, taught).items():
                values = {"state": label_state(label, known), "label": label}
                set_values(connection, ids, **values, labelled_by=people.get(label, who), labelled_at=time.time())
                note(connection, who, "relabel", len(ids), label)
            _settle(connection, known, f"{version}: served again", who)

    def begin_class(self, label: str, who: str) -> None:
        """Begin a class without examples; a LabelError if it was begun before."""
        label = check_label(label)
        with self._database.writing() as connection:
            if connection.execute(select(drafts.c.label).where(drafts.c.label == label)).first():
                raise LabelError(f"class {label!r} exists; allowed: a new name")
            _begin(connection, label, who)
            note(connection, who, "begin", 0, label)

    def drafts(self) -> dict[str, tuple[str, float]]:
        """Classes that were begun: who did, and when. Without those whose row something else has changed."""
        with self._database.reading() as connection:
            rows = connection.execute(select(drafts).order_by(drafts.c.label)).all()
        return {row.label: (row.who, row.at) for row in rows if is_text(row.label) and is_text(row.who)}


class PublishedLabels(NamedTuple):
    """How the labels of examples follow a version that was published."""

    forgotten: tuple[str, ...]
    renamed: Mapping[str, str]
    """Old label -> new label, of classes that were renamed or merged."""
    known: tuple[str, ...]
    """All classes of the version."""
    what: str
    """The version and what it changed, for the log."""

    def apply(self, connection: Connection, who: str) -> None:
        """Change the labels, as part of a transaction."""
        for label in self.forgotten:
            _withdraw_class(connection, label, who)
        for label, new in self.renamed.items():
            _relabel(connection, label, new, self.known, who)
        _settle(connection, self.known, self.what, who)


def _with_other_labels(connection: Connection, taught: Mapping[str, str]) -> dict[str, list[int]]:
    """The items of image files that do not have the label given for them, by that label; those that a run has learned
    are left out."""
    found: dict[str, list[int]] = {}
    for some in chunks(sorted(taught)):
        rows = connection.execute(select(*_COLUMNS).where(items.c.sha256.in_(some), items.c.state != "learned"))
        for each in _whole(rows):
            if each.label != taught[each.digest]:
                found.setdefault(taught[each.digest], []).append(each.id)
    return found


def _whole(rows: Iterable[Sequence[Any]]) -> list[Example]:
    """The examples in rows, without damaged ones."""
    return [found for row in rows if (found := example_of(row)) is not None]


def _relabel(connection: Connection, label: str, new: str, known: Collection[str], who: str) -> int:
    own = (items.c.label == label) & items.c.state.in_(LABELLED)
    values = {"label": new, "state": label_state(new, known)}
    count = connection.execute(update(items).where(own).values(values)).rowcount
    begun = connection.execute(delete(drafts).where(drafts.c.label == label)).rowcount
    if (
        begun
        and new not in known
        and not connection.execute(select(drafts.c.label).where(drafts.c.label == new)).first()
    ):
        _begin(connection, new, who)
    note(connection, who, "rename", count, f"{label} to {new}")
    return count


def _withdraw_class(connection: Connection, label: str, who: str) -> list[int]:
    own = (items.c.label == label) & items.c.state.in_(LABELLED)
    values = {"state": "new", "label": None, "labelled_by": None, "labelled_at": None, "learned_in": None}
    ids = list(connection.execute(update(items).where(own).values(values).returning(items.c.id)).scalars())
    connection.execute(delete(drafts).where(drafts.c.label == label))
    note(connection, who, "forget", len(ids), label)
    return ids


def _settle(connection: Connection, known: Collection[str], what: str, who: str) -> None:
    labels = connection.execute(select(items.c.label).where(items.c.state.in_(LABELLED)).distinct()).scalars()
    for label in [label for label in labels if isinstance(label, str)]:
        own = (items.c.label == label) & items.c.state.in_(LABELLED)
        connection.execute(update(items).where(own).values(state=label_state(label, known)))
    for some in chunks(sorted(known)):
        connection.execute(delete(drafts).where(drafts.c.label.in_(some)))
    note(connection, who, "publish", 0, what)


def _begin(connection: Connection, label: str, who: str) -> None:
    connection.execute(insert(drafts).values(label=label, who=who, at=time.time()))
