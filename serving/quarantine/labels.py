"""The groups and labels of items, and the log of who changed them."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from sqlalchemy import Connection, delete, func, insert, select, update

from serving.bundle.labels import LONGEST_NEW, check_labels, check_new_label, plain, same_label
from serving.quarantine.database import Database
from serving.quarantine.records import (
    Change,
    FoundGroup,
    ItemGroup,
    ItemState,
    LabelError,
    LearnedError,
    UnknownIdError,
)
from serving.quarantine.rows import STATES, change_of, is_text
from serving.quarantine.schema import changes, groups, items, resemblances, sum_of

_KEYS_PER_STATEMENT = 1000
"""Ids or file names per statement; databases limit them."""
Key = TypeVar("Key", int, str)


class LabelledItems:
    """Changes by people and by training.discover; each method is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def name(self, ids: Sequence[int], label: str, who: str) -> None:
        """Label items as showing a new class."""
        self._label(ids, "named", check_label(label), who)

    def mark_known(self, ids: Sequence[int], label: str, who: str) -> None:
        """Label items as showing a class of the model, spelled as the model spells it."""
        self._label(ids, "known", check_label(label, [label]), who)

    def mark_junk(self, ids: Sequence[int], who: str) -> None:
        """Label items as useless."""
        self._label(ids, "junk", None, who)

    def clear(self, ids: Sequence[int], who: str) -> None:
        """Remove the labels of items."""
        self._label(ids, "new", None, who)

    def _label(self, ids: Sequence[int], state: ItemState, label: str | None, who: str) -> None:
        by, at = (None, None) if state == "new" else (who, time.time())
        with self._database.writing() as connection:
            ids = existing_ids(connection, ids)
            _refuse_learned(connection, ids)
            set_values(connection, ids, state=state, label=label, labelled_by=by, labelled_at=at)
            note(connection, who, {"new": "clear", "named": "name"}.get(state, state), len(ids), label or "")

    def count_labelled(self) -> dict[str, int]:
        """The number of items that are named as new classes and not learned yet, by label."""
        counted = select(items.c.label, func.count()).where(items.c.state == "named").group_by(items.c.label)
        with self._database.reading() as connection:
            found = connection.execute(counted)
            return dict(sorted((label, count) for label, count in found if is_text(label)))

    def mark_learned(self, learned: Mapping[str, Sequence[int]], version: str) -> int:
        """Mark {label: ids} as learned; items that were renamed, cleared or deleted meanwhile are skipped."""
        count = 0
        with self._database.writing() as connection:
            for label, ids in learned.items():
                for some in chunks(list(ids)):
                    named = items.c.id.in_(some) & (items.c.state == "named") & (items.c.label == label)
                    marked = update(items).where(named).values(state="learned", learned_in=version)
                    count += connection.execute(marked).rowcount
        return count

    def groups(self) -> list[ItemGroup]:
        """All groups, those with new items first, each in the order in which they were found."""
        key = (items.c.group, items.c.state, items.c.label)
        counted = select(*key, func.count(), sum_of(items.c.copies)).where(items.c.group.is_not(None)).group_by(*key)
        parts: dict[int, list[Any]] = defaultdict(list)
        with self._database.reading() as connection:
            for row in connection.execute(counted):
                parts[row[0]].append(row)
            rows = connection.execute(select(groups).order_by(groups.c.id)).all()
        found = [_group(row, parts[row.id]) for row in rows if row.id in parts]
        return sorted(found, key=lambda group: "new" not in group.states)

    def members(self, group: int) -> dict[int, ItemState]:
        """Ids and states of a group's items, without loading the items."""
        found = select(items.c.id, items.c.state).where(items.c.group == group).order_by(items.c.id)
        with self._database.reading() as connection:
            return {row.id: row.state for row in connection.execute(found)}

    def move(self, ids: Sequence[int], group: int | None, who: str) -> None:
        """Move items into a group, or out of every group."""
        with self._database.writing() as connection:
            ids = existing_ids(connection, ids)
            if group is not None:
                _existing_groups(connection, [group])
            set_values(connection, ids, group=group)
            remove_empty_groups(connection, but=group)
            note(connection, who, "move", len(ids), "out of every group" if group is None else f"to group {group}")

    def merge(self, ids: Sequence[int], who: str) -> int:
        """Merge groups into the first one, which is returned."""
        ids = list(dict.fromkeys(ids))
        if len(ids) < 2:
            raise UnknownIdError(f"{len(ids)} groups to merge; allowed: 2 or more")
        first, *others = ids
        with self._database.writing() as connection:
            merged = _existing_groups(connection, ids)
            moved = 0
            for some in chunks(others):
                moved += connection.execute(update(items).where(items.c.group.in_(some)).values(group=first)).rowcount
            near = {row.near_class for row in merged}
            values = {
                # An estimate: merged groups are at most as cohesive as the least cohesive one.
                "cohesion": min(row.cohesion for row in merged),
                "near_class": near.pop() if len(near) == 1 else None,
                "shifted": all(row.shifted for row in merged),
            }
            connection.execute(update(groups).where(groups.c.id == first).values(values))
            remove_empty_groups(connection, but=first)
            note(connection, who, "merge", moved, f"groups {', '.join(map(str, others))} into group {first}")
        return first

    def split(self, ids: Sequence[int], who: str) -> int:
        """Move items into a new group, which is returned."""
        with self._database.writing() as connection:
            ids = existing_ids(connection, ids)
            one = select(groups).where(groups.c.id.in_(select(items.c.group).where(items.c.id == ids[0])))
            row = connection.execute(one).first()
            values = {
                "cohesion": row.cohesion if row is not None else 0.0,
                "near_class": row.near_class if row is not None else None,
                "shifted": row.shifted if row is not None else False,
            }
            group = int(connection.execute(insert(groups).values(values).returning(groups.c.id)).scalar_one())
            set_values(connection, ids, group=group)
            remove_empty_groups(connection, but=group)
            note(connection, who, "split", len(ids), f"to group {group}")
        return group

    def replace_groups(
        self, found: Sequence[FoundGroup], loose: Mapping[int, tuple[int, float]] = MappingProxyType({})
    ) -> None:
        """Move new items to the groups that were found; labelled items keep their label and group.

        `loose` are items without a group: the place in `found` of the one that they resemble most, and how much.
        """
        listed = [member for grouping in found for member in grouping.members]
        if twice := sorted(member for member, count in Counter(listed).items() if count > 1):
            raise ValueError(f"in more than one group: items {twice[:5]}; allowed: each in one")
        if wrong := [grouping.cohesion for grouping in found if not 0 <= grouping.cohesion <= 1]:
            raise ValueError(f"cohesion is {wrong[0]}; allowed: 0 to 1")
        with self._database.writing() as connection:
            present = set(_present(connection, listed))
            connection.execute(update(items).where(items.c.state == "new").values(group=None))
            ids: dict[int, int] = {}
            for place, grouping in enumerate(found):
                if members := [member for member in grouping.members if member in present]:
                    values = {name: getattr(grouping, name) for name in ("cohesion", "near_class", "shifted")}
                    group = connection.execute(insert(groups).values(values).returning(groups.c.id)).scalar_one()
                    set_values(connection, members, group=group)
                    ids[place] = group
            connection.execute(delete(resemblances))
            there = set(_present(connection, list(loose)))
            rows = [
                {"item": item, "group": ids[place], "similarity": similarity}
                for item, (place, similarity) in loose.items()
                if item in there and place in ids
            ]
            if rows:
                connection.execute(insert(resemblances), rows)
            remove_empty_groups(connection)

    def resemblances(self, ids: Sequence[int]) -> dict[int, tuple[int, float]]:
        """The group that items without a group resemble most, and how much."""
        found: dict[int, tuple[int, float]] = {}
        with self._database.reading() as connection:
            for some in chunks(list(ids)):
                for row in connection.execute(select(resemblances).where(resemblances.c.item.in_(some))):
                    found[row.item] = (row.group, row.similarity)
        return found

    def changes(self, limit: int = 100) -> list[Change]:
        """The change log, the latest entry first."""
        columns = [changes.c[name] for name in Change._fields]
        with self._database.reading() as connection:
            rows = connection.execute(select(*columns).order_by(changes.c.id.desc()).limit(limit))
            return [change_of(row) for row in rows]


def label_state(label: str | None, known: Collection[str]) -> ItemState:
    """The state of an item with this label, if `known` are the classes of the model."""
    return "new" if label is None else "known" if label in known else "named"


def chunks(keys: Sequence[Key]) -> Iterator[Sequence[Key]]:
    for start in range(0, len(keys), _KEYS_PER_STATEMENT):
        yield keys[start : start + _KEYS_PER_STATEMENT]


def note(connection: Connection, who: str, what: str, count: int, detail: str = "") -> None:
    """Record who did what."""
    entry = {"at": time.time(), "who": _checked_person(who), "what": what, "items": count, "detail": detail}
    connection.execute(insert(changes).values(entry))


def remove_empty_groups(connection: Connection, but: int | None = None) -> None:
    used = select(items.c.group).where(items.c.group.is_not(None))
    connection.execute(delete(groups).where(groups.c.id.not_in(used), groups.c.id != (-1 if but is None else but)))


def _group(row: Any, members: Sequence[Any]) -> ItemGroup:
    states: Counter[ItemState] = Counter()
    labels: Counter[str | None] = Counter()
    for _, state, label, count, _ in members:
        # A state that does not exist is that of a damaged row, which is shown as new.
        states[state if state in STATES else "new"] += count
        labels[label if is_text(label) else None] += count
    return ItemGroup(
        id=row.id,
        cohesion=row.cohesion if isinstance(row.cohesion, float) and 0 <= row.cohesion <= 1 else 0.0,
        near_class=row.near_class if is_text(row.near_class) else None,
        shifted=row.shifted is True,
        size=sum(states.values()),
        copies=int(sum(copies for *_, copies in members)),
        state=next(iter(states)) if len(states) == 1 else None,
        label=next(iter(labels)) if len(labels) == 1 else None,
        states=dict(states),
        labels={label: count for label, count in labels.items() if label is not None},
    )


def set_values(connection: Connection, ids: Sequence[int], **values: Any) -> None:
    for some in chunks(ids):
        connection.execute(update(items).where(items.c.id.in_(some)).values(values))


def _present(connection: Connection, ids: Sequence[int]) -> list[int]:
    found: list[int] = []
    for some in chunks(ids):
        found += connection.execute(select(items.c.id).where(items.c.id.in_(some))).scalars()
    return found


def existing_ids(connection: Connection, ids: Sequence[int]) -> list[int]:
    wanted = list(dict.fromkeys(ids))
    if not wanted:
        raise UnknownIdError("no item given; allowed: 1 or more")
    if missing := sorted(set(wanted) - set(_present(connection, wanted))):
        raise UnknownIdError(f"no item {', '.join(map(str, missing[:5]))}{' ...' if len(missing) > 5 else ''}")
    return wanted


def _existing_groups(connection: Connection, ids: Sequence[int]) -> list[Any]:
    found = [row for some in chunks(ids) for row in connection.execute(select(groups).where(groups.c.id.in_(some)))]
    if missing := sorted(set(ids) - {row.id for row in found}):
        raise UnknownIdError(f"no group {', '.join(map(str, missing[:5]))}")
    return found


def _refuse_learned(connection: Connection, ids: Sequence[int]) -> None:
    for some in chunks(ids):
        learned = select(items).where(items.c.id.in_(some), items.c.state == "learned")
        if row := connection.execute(learned.limit(1)).first():
            raise LearnedError(
                f"item {row.id} was learned as {row.label!r} in version {row.learned_in} and cannot be changed"
            )


def check_label(text: str, known: Collection[str] = ()) -> str:
    """The class that a person means: one of `known` as it is spelled there, or else a new one as people see its name.
    Raises a LabelError if no class may have this name."""
    existing = same_label(text, known)
    try:
        if existing is not None:
            check_labels([existing])
        else:
            check_new_label(plain(text))
    except ValueError as error:
        raise LabelError(str(error)) from None
    return plain(text) if existing is None else existing


def _checked_person(who: str) -> str:
    stripped = who.strip()
    if not 1 <= len(stripped) <= LONGEST_NEW or not stripped.isprintable():
        allowed = f"1 to {LONGEST_NEW} printable characters"
        raise LabelError(f"name of a person is {who[:LONGEST_NEW]!r}; allowed: {allowed}")
    return stripped
