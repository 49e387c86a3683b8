"""From rows of the database to records.

A row that something else has changed becomes a record that names its damage: one such row must not make the whole page
fail, and nothing that it contains is trusted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard, get_args

import numpy as np
from pydantic_core import from_json

from serving.quarantine.images import is_own_name
from serving.quarantine.records import Change, Example, Item, ItemKind, ItemState, Outlined

STATES: tuple[ItemState, ...] = get_args(ItemState)
KINDS: tuple[ItemKind, ...] = get_args(ItemKind)

MOST = 2**53
"""Whole numbers up to this one are exact in every reader of JSON."""
LATEST = 253_402_300_800.0
"""The year 10000 in seconds since the epoch: the first one that has no date of four digits."""
DAMAGED = "damaged"
"""Shown as the action of a damaged entry of the change log."""


def is_count(value: object) -> TypeGuard[int]:
    """Whether it is a valid count."""
    return isinstance(value, int) and 0 <= value <= MOST


def is_time(value: object) -> TypeGuard[float]:
    """Whether it is a time in seconds since the epoch that has a date."""
    return isinstance(value, float) and 0 <= value < LATEST


def is_text(value: object) -> TypeGuard[str]:
    """Whether it is text that can be written as UTF-8."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def json_object(text: object) -> dict[str, Any] | None:
    """The JSON object in a text; None if it is something else. All text in it can be written as UTF-8."""
    try:
        # Unlike json.loads, it refuses lone surrogates, and limits how deep lists are nested.
        found = from_json(text) if isinstance(text, str) else None
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


_COLUMNS: tuple[tuple[Callable[[object], bool], str, tuple[str, ...], tuple[str, ...]], ...] = (
    (is_count, "whole number that is not negative", ("copies", "width", "height", "size"), ("group",)),
    (is_time, "time that has a date", ("received_at", "seen_at"), ("labelled_at",)),
    (is_text, "text", ("model_version", "media_type"), ("label", "labelled_by", "learned_in")),
)
"""Checks of the columns of an item: function, description, columns, and columns that may also be empty."""


def item_of(row: Mapping[str, Any], mark: str) -> Item:
    """The item of a row with the columns of an Item and `file`; `mark` is that of the quarantine."""
    try:
        return _whole(row, mark)
    except ValueError as error:
        return _damaged(row, str(error))


def _whole(row: Mapping[str, Any], mark: str) -> Item:
    values = dict(row)
    file, features = values.pop("file"), values.pop("features")
    if not (isinstance(file, str) and is_own_name(file, mark)):
        raise ValueError("file is not a name that this quarantine makes")
    if values["state"] not in STATES or values["kind"] not in KINDS:
        raise ValueError("state or kind is none that exists")
    for is_right, meant, columns, or_empty in _COLUMNS:
        for name in (*columns, *or_empty):
            if not (is_right(values[name]) or (name in or_empty and values[name] is None)):
                raise ValueError(f"{name} is no {meant}")
    answer = json_object(values.pop("answer"))
    if answer is None:
        raise ValueError("answer is not a JSON object")
    if not isinstance(features, bytes) or len(features) % 4:
        raise ValueError("features are not 32-bit numbers")
    numbers = np.frombuffer(features, dtype="<f4").astype(np.float32)
    return Item(**values, answer=answer, features=numbers, digest=file.partition("-")[0])


def _damaged(row: Mapping[str, Any], damage: str) -> Item:
    """An item with only the fields that are needed to find and delete it."""
    state, kind, group = row["state"], row["kind"], row["group"]
    return Item(
        id=row["id"],
        state=state if state in STATES else "new",
        kind=kind if kind in KINDS else "unknown",
        group=group if is_count(group) else None,
        label=None,
        labelled_by=None,
        labelled_at=None,
        learned_in=None,
        received_at=0.0,
        seen_at=0.0,
        model_version="",
        copies=1,
        width=0,
        height=0,
        size=0,
        media_type="",
        answer={},
        features=np.zeros(0, dtype=np.float32),
        damage=damage,
    )


def outlined_of(row: Sequence[Any]) -> Outlined:
    """The outline of a row with its columns."""
    number, group, state, label = row
    return Outlined(
        number,
        group if is_count(group) else None,
        state if state in STATES else "new",
        label if is_text(label) else None,
    )


def example_of(row: Sequence[Any]) -> Example | None:
    """The labelled item of a row with its columns; None if its label or its file is not what it may be."""
    number, digest, label, state, by, at, size = row
    if not (is_text(digest) and state in STATES and (label is None or is_text(label))):
        return None
    by, at = by if is_text(by) else None, at if is_time(at) else None
    return Example(number, digest, label, state, by, at, size if is_count(size) else 0)


def change_of(row: Sequence[Any]) -> Change:
    """The entry of the change log in a row with its columns; a damaged one keeps what can be shown of it."""
    at, who, what, count, detail = row
    is_whole = is_time(at) and is_text(who) and is_text(what) and is_count(count) and is_text(detail)
    if is_whole:
        return Change(at, who, what, count, detail)
    return Change(at if is_time(at) else 0.0, who if is_text(who) else "", DAMAGED, 0, "")
