"""How much a quarantine holds, and what goes when that is too much."""

from __future__ import annotations

import time
from collections.abc import Iterator

from sqlalchemy import ColumnElement, Connection, func, select

from serving.quarantine.records import Caps, Held, State
from serving.quarantine.schema import items

DAY = 86_400.0

_GO_FIRST: tuple[tuple[State, ...], ...] = (("learned", "junk"), ("new",), ("named", "known"))
"""What nobody needs any more goes first, then what nobody has looked at; a person's work goes last."""
_LABELLED = _GO_FIRST[-1]
_AT_ONCE = 500


def held(connection: Connection, *wanted: ColumnElement[bool]) -> Held:
    """All that is there, or all that is wanted of it."""
    counted = select(items.c.state, func.count(), func.sum(items.c.bytes)).where(*wanted).group_by(items.c.state)
    rows = connection.execute(counted).all()
    return Held(sum(row[1] for row in rows), int(sum(row[2] for row in rows)), {row[0]: row[1] for row in rows})


def excess(connection: Connection, caps: Caps) -> dict[str, list[int]]:
    """Ids of what must go, by the cap that it is over: `days`, `items` or `bytes`."""
    latest = time.time() - DAY * caps.days
    # To label an item is to look after it: its age counts from then.
    labelled = items.c.state.in_(_LABELLED)
    expired = (~labelled & (items.c.received_at < latest)) | (labelled & (items.c.labelled_at < latest))
    gone = {"days": list(connection.execute(select(items.c.id).where(expired)).scalars()), "items": [], "bytes": []}
    there = held(connection, ~expired)
    too_many, too_much = there.items - caps.items, there.bytes - caps.bytes
    for item_id, size in _in_turn(connection, ~expired):
        if too_many <= 0 and too_much <= 0:
            break
        gone["items" if too_many > 0 else "bytes"].append(item_id)
        too_many, too_much = too_many - 1, too_much - size
    return {reason: ids for reason, ids in gone.items() if ids}


def _in_turn(connection: Connection, wanted: ColumnElement[bool]) -> Iterator[tuple[int, int]]:
    """(id, bytes) of what goes first, the oldest first."""
    for states in _GO_FIRST:
        query = select(items.c.id, items.c.bytes).where(wanted, items.c.state.in_(states))
        query = query.order_by(items.c.received_at, items.c.id)
        offset = 0
        while rows := connection.execute(query.limit(_AT_ONCE).offset(offset)).all():
            yield from ((row[0], row[1]) for row in rows)
            offset += _AT_ONCE
