"""What the server did not know, kept for a person to name and for the next task to learn.

Importing this is cheap: the database library is loaded by `store` and `keeper`, which only a configured quarantine
needs. Nothing here needs BentoML, so that training reads the same store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    LabelError,
    LearnedError,
    State,
    StoreError,
    UnavailableError,
    UnknownIdError,
)
from serving.settings import Settings

if TYPE_CHECKING:
    from serving.quarantine.keeper import Keeper


def keeper_of(settings: Settings) -> Keeper | None:
    """The keeper of a worker; None where no quarantine is configured."""
    if settings.quarantine_url is None:
        return None
    from serving.quarantine.keeper import Keeper

    return Keeper.from_settings(settings)


__all__ = [
    "Added",
    "Arrival",
    "Caps",
    "Change",
    "Group",
    "Grouping",
    "Held",
    "Item",
    "Kind",
    "LabelError",
    "LearnedError",
    "State",
    "StoreError",
    "UnavailableError",
    "UnknownIdError",
    "keeper_of",
]
