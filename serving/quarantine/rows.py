"""From a row of the database to an Item.

A row that something else has changed becomes an item that names its damage: one such row must not make the whole page
fail, and nothing that it contains is trusted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, get_args

import numpy as np

from serving.quarantine.images import is_own_name
from serving.quarantine.records import Item, ItemKind, ItemState

STATES: tuple[ItemState, ...] = get_args(ItemState)
KINDS: tuple[ItemKind, ...] = get_args(ItemKind)

_WHOLE = ("copies", "width", "height", "size")
_TIMES = ("received_at", "seen_at")
_TEXTS = ("model_version", "media_type")
_TEXTS_OR_NONE = ("label", "labelled_by", "learned_in")


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
    for names, kinds in ((_WHOLE, int), (_TIMES, float), (_TEXTS, str), (_TEXTS_OR_NONE, str | None)):
        for name in names:
            if not isinstance(values[name], kinds):
                raise ValueError(f"{name} is {type(values[name]).__name__}")
    if not isinstance(values["labelled_at"], float | None) or not isinstance(values["group"], int | None):
        raise ValueError("labelled_at or group is not a number")
    answer = _answer(values.pop("answer"))
    if not isinstance(features, bytes) or len(features) % 4:
        raise ValueError("features are not 32-bit numbers")
    numbers = np.frombuffer(features, dtype="<f4").astype(np.float32)
    return Item(**values, answer=answer, features=numbers, digest=file.partition("-")[0])


def _answer(text: Any) -> dict[str, Any]:
    try:
        answer = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        raise ValueError("answer is not a JSON object")
    return answer


def _damaged(row: Mapping[str, Any], damage: str) -> Item:
    """An item of which only what is needed to find and delete it is kept."""
    state, kind, group = row["state"], row["kind"], row["group"]
    return Item(
        id=row["id"],
        state=state if state in STATES else "new",
        kind=kind if kind in KINDS else "unknown",
        group=group if isinstance(group, int) else None,
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
