"""How much a quarantine stores, and which items are removed when that is too much."""

from __future__ import annotations

import time
from collections.abc import Iterator

from sqlalchemy import ColumnElement, Connection, func, select

from serving.quarantine.records import Caps, ItemState, Usage
from serving.quarantine.rows import STATES, is_count
from serving.quarantine.schema import items, sum_of

DAY = 86_400.0

_REMOVAL_ORDER: tuple[tuple[ItemState, ...], ...] = (("learned", "junk"), ("new",), ("named", "known"))
"""The order of removal: items that are no longer needed, then unlabelled ones, and a person's labels last. Damaged
items, which have another state, come before all of them."""
_LABELLED = _REMOVAL_ORDER[-1]
_PAGE = 500


def usage(connection: Connection, *wanted: ColumnElement[bool]) -> Usage:
    """The number and size of all items, or of those that match."""
    counted = select(items.c.state, func.count(), sum_of(items.c.bytes)).where(*wanted).group_by(items.c.state)
    rows = connection.execute(counted).all()
    return Usage(
        sum(row[1] for row in rows),
        int(sum(row[2] for row in rows)),
        {row[0]: row[1] for row in rows if row[0] in STATES},
    )


def excess(connection: Connection, caps: Caps) -> dict[str, list[int]]:
    """Ids of items to remove, by the limit that they exceed: `days`, `items` or `bytes`."""
    latest = time.time() - DAY * caps.days
    labelled = items.c.state.in_(_LABELLED)
    expired = ~labelled & (items.c.received_at < latest)
    if caps.labels_expire:
        # The age of a labelled item counts from when it was labelled.
        expired |= labelled & (items.c.labelled_at < latest)
    removed = {"days": list(connection.execute(select(items.c.id).where(expired)).scalars()), "items": [], "bytes": []}
    stored = usage(connection, ~expired)
    too_many, too_much = stored.items - caps.items, stored.bytes - caps.bytes
    for item_id, size in _removal_candidates(connection, ~expired):
        if too_many <= 0 and too_much <= 0:
            break
        removed["items" if too_many > 0 else "bytes"].append(item_id)
        too_many, too_much = too_many - 1, too_much - size
    return {reason: ids for reason, ids in removed.items() if ids}


def _removal_candidates(connection: Connection, wanted: ColumnElement[bool]) -> Iterator[tuple[int, int]]:
    """(id, bytes) in the order of removal, the oldest first within a state."""
    for condition in (items.c.state.not_in(STATES), *(items.c.state.in_(states) for states in _REMOVAL_ORDER)):
        query = select(items.c.id, items.c.bytes).where(wanted, condition)
        query = query.order_by(items.c.received_at, items.c.id)
        offset = 0
        while rows := connection.execute(query.limit(_PAGE).offset(offset)).all():
            yield from ((row[0], row[1] if is_count(row[1]) else 0) for row in rows)
            offset += _PAGE
