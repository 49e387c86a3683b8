"""What people and training.discover do to items and groups, each inside a transaction of the caller's."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, delete, func, insert, select, update

from serving.quarantine.records import Group, Grouping, LabelError, LearnedError, State, UnknownIdError
from serving.quarantine.schema import changes, groups, items

LONGEST = 100
RESERVED = "unknown"
"""What the server answers where it does not know: no class can be called so."""
_AT_ONCE = 1000
"""Ids in one statement; databases have limits."""


def chunks(ids: Sequence[int]) -> Iterator[Sequence[int]]:
    for start in range(0, len(ids), _AT_ONCE):
        yield ids[start : start + _AT_ONCE]


def checked_label(label: str) -> str:
    allowed = f"1 to {LONGEST} printable characters, and not {RESERVED!r}"
    if label.strip() == RESERVED:
        raise LabelError(f"label is {label!r}; allowed: {allowed}")
    return _checked(label, "label", allowed=allowed)


def note(connection: Connection, who: str, what: str, count: int, detail: str = "") -> None:
    """Write down who did what."""
    who = _checked(who, "name of a person", allowed=f"1 to {LONGEST} printable characters")
    entry = {"at": time.time(), "who": who, "what": what, "items": count, "detail": detail}
    connection.execute(insert(changes).values(entry))


def label_items(connection: Connection, ids: Sequence[int], state: State, label: str | None, who: str) -> None:
    """Give items a state and a label; `new` takes both away."""
    ids = _all_there(connection, ids)
    _refuse_learned(connection, ids)
    by, at = (None, None) if state == "new" else (who, time.time())
    _set(connection, ids, state=state, label=label, labelled_by=by, labelled_at=at)
    note(connection, who, {"new": "clear", "named": "name"}.get(state, state), len(ids), label or "")


def move(connection: Connection, ids: Sequence[int], group: int | None, who: str) -> None:
    ids = _all_there(connection, ids)
    if group is not None:
        _groups_there(connection, [group])
    _set(connection, ids, group=group)
    remove_empty_groups(connection, but=group)
    note(connection, who, "move", len(ids), "out of every group" if group is None else f"to group {group}")


def merge(connection: Connection, ids: Sequence[int], who: str) -> int:
    """All members of some groups into the first of them."""
    ids = list(dict.fromkeys(ids))
    if len(ids) < 2:
        raise UnknownIdError(f"{len(ids)} groups to merge; allowed: 2 or more")
    merged = _groups_there(connection, ids)
    first = ids[0]
    moved = 0
    for some in chunks(ids[1:]):
        moved += connection.execute(update(items).where(items.c.group.in_(some)).values(group=first)).rowcount
    near = {row.near_class for row in merged}
    values = {
        # Together they are at most as tight as the loosest of them; nobody has measured it.
        "cohesion": min(row.cohesion for row in merged),
        "near_class": near.pop() if len(near) == 1 else None,
        "shifted": all(row.shifted for row in merged),
    }
    connection.execute(update(groups).where(groups.c.id == first).values(values))
    remove_empty_groups(connection, but=first)
    note(connection, who, "merge", moved, f"groups {', '.join(map(str, ids[1:]))} into group {first}")
    return first


def replace_groups(connection: Connection, found: Sequence[Grouping]) -> None:
    """New items leave their groups for those found; labelled ones keep theirs unless they are listed."""
    listed = [member for grouping in found for member in grouping.members]
    if twice := sorted(member for member, count in Counter(listed).items() if count > 1):
        raise ValueError(f"in more than one group: items {twice[:5]}; allowed: each in one")
    there = set(_existing(connection, listed))
    connection.execute(update(items).where(items.c.state == "new").values(group=None))
    for grouping in found:
        if not 0 <= grouping.cohesion <= 1:
            raise ValueError(f"cohesion is {grouping.cohesion}; allowed: 0 to 1")
        if members := [member for member in grouping.members if member in there]:
            values = {name: getattr(grouping, name) for name in ("cohesion", "near_class", "shifted")}
            group = connection.execute(insert(groups).values(values).returning(groups.c.id)).scalar_one()
            _set(connection, members, group=group)
    remove_empty_groups(connection)


def all_groups(connection: Connection) -> list[Group]:
    """Those with items to be looked at first, each in the order in which they were found."""
    columns = (items.c.group, items.c.state, items.c.label, func.count(), func.sum(items.c.copies))
    counted = select(*columns).where(items.c.group.is_not(None)).group_by(items.c.group, items.c.state, items.c.label)
    parts: dict[int, list[Any]] = defaultdict(list)
    for row in connection.execute(counted):
        parts[row[0]].append(row)
    made = []
    for row in connection.execute(select(groups).order_by(groups.c.id)):
        if members := parts.get(row.id):
            made.append(_group(row, members))
    return sorted(made, key=lambda group: "new" not in group.states)


def members(connection: Connection, group: int) -> dict[int, State]:
    found = select(items.c.id, items.c.state).where(items.c.group == group).order_by(items.c.id)
    return {row.id: row.state for row in connection.execute(found)}


def count_named(connection: Connection) -> dict[str, int]:
    counted = select(items.c.label, func.count()).where(items.c.state == "named").group_by(items.c.label)
    return dict(sorted((label, count) for label, count in connection.execute(counted)))


def remove_empty_groups(connection: Connection, but: int | None = None) -> None:
    used = select(items.c.group).where(items.c.group.is_not(None))
    connection.execute(delete(groups).where(groups.c.id.not_in(used), groups.c.id != (-1 if but is None else but)))


def mark_learned(connection: Connection, learned: Mapping[str, Sequence[int]], version: str) -> int:
    """Those that still bear the label that they were learned under."""
    count = 0
    for label, ids in learned.items():
        for some in chunks(list(ids)):
            named = items.c.id.in_(some) & (items.c.state == "named") & (items.c.label == label)
            count += connection.execute(update(items).where(named).values(state="learned", learned_in=version)).rowcount
    return count


def _group(row: Any, members: Sequence[Any]) -> Group:
    states: Counter[State] = Counter()
    labels: Counter[str | None] = Counter()
    for _, state, label, count, _ in members:
        states[state] += count
        labels[label] += count
    return Group(
        id=row.id,
        size=sum(states.values()),
        copies=int(sum(copies for *_, copies in members)),
        cohesion=row.cohesion,
        near_class=row.near_class,
        shifted=row.shifted,
        state=next(iter(states)) if len(states) == 1 else None,
        label=next(iter(labels)) if len(labels) == 1 else None,
        states=dict(states),
        labels={label: count for label, count in labels.items() if label is not None},
    )


def _set(connection: Connection, ids: Sequence[int], **values: Any) -> None:
    for some in chunks(ids):
        connection.execute(update(items).where(items.c.id.in_(some)).values(values))


def _existing(connection: Connection, ids: Sequence[int]) -> list[int]:
    found: list[int] = []
    for some in chunks(list(ids)):
        found += connection.execute(select(items.c.id).where(items.c.id.in_(some))).scalars()
    return found


def _all_there(connection: Connection, ids: Sequence[int]) -> list[int]:
    wanted = list(dict.fromkeys(ids))
    if not wanted:
        raise UnknownIdError("no item given; allowed: 1 or more")
    if missing := sorted(set(wanted) - set(_existing(connection, wanted))):
        raise UnknownIdError(f"no item {', '.join(map(str, missing[:5]))}{' ...' if len(missing) > 5 else ''}")
    return wanted


def _groups_there(connection: Connection, ids: Sequence[int]) -> list[Any]:
    found = [row for some in chunks(ids) for row in connection.execute(select(groups).where(groups.c.id.in_(some)))]
    if missing := sorted(set(ids) - {row.id for row in found}):
        raise UnknownIdError(f"no group {', '.join(map(str, missing[:5]))}")
    return found


def _refuse_learned(connection: Connection, ids: Sequence[int]) -> None:
    for some in chunks(ids):
        learned = select(items.c.id, items.c.label, items.c.learned_in).where(
            items.c.id.in_(some), items.c.state == "learned"
        )
        if row := connection.execute(learned.limit(1)).first():
            raise LearnedError(f"item {row.id} was learned as {row.label!r} in version {row.learned_in}: it stays so")


def _checked(text: str, what: str, *, allowed: str) -> str:
    stripped = text.strip()
    if not 1 <= len(stripped) <= LONGEST or not stripped.isprintable():
        raise LabelError(f"{what} is {text[:LONGEST]!r}; allowed: {allowed}")
    return stripped
