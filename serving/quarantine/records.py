"""What goes into a quarantine and what comes out of it, and what can go wrong; without the database library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Kind = Literal["unknown", "audit"]
"""Why an image was kept: no task knew it, or it was accepted and drawn for a later look."""

State = Literal["new", "named", "known", "junk", "learned"]
"""Not looked at yet; named as a new class; shows a class that the model has; of no use; named and learned since."""


class StoreError(Exception):
    """The quarantine cannot do what was asked; the message says what and why, for people."""


class UnknownIdError(StoreError):
    """There is no such item or group (any more)."""


class LabelError(StoreError):
    """A label, or the name of who gives it, that cannot be used."""


class LearnedError(StoreError):
    """A label that is in the model already, and no longer to be changed."""


class UnavailableError(StoreError):
    """The database or the place of the images cannot be used now; the same may work later."""

    def __init__(self, problem: str, *, part: Literal["database", "images"]) -> None:
        super().__init__(problem)
        self.part = part


class Arrival(NamedTuple):
    """An image that was answered, as it is handed over to be kept."""

    content: bytes
    kind: Kind
    received_at: float
    """Seconds since the epoch."""
    model_version: str
    answer: dict[str, Any]
    features: NDArray[np.float32]
    """All tasks' standardised features side by side, [D]."""


class Added(NamedTuple):
    """What became of some arrivals."""

    kept: list[int]
    """Ids of the new items."""
    copies: int
    """Arrivals that were counted on an item that is there already."""


@dataclass(frozen=True)
class Item:
    """One image in quarantine."""

    id: int
    state: State
    kind: Kind
    group: int | None
    label: str | None
    labelled_by: str | None
    labelled_at: float | None
    learned_in: str | None
    """The version of the model that learned it."""
    received_at: float
    seen_at: float
    """When it came last; the same as `received_at` unless it came again."""
    model_version: str
    copies: int
    """How often it came."""
    width: int
    height: int
    size: int
    """Bytes of the image file."""
    media_type: str
    answer: dict[str, Any]
    features: NDArray[np.float32]


class Grouping(NamedTuple):
    """Items that look alike, as found by training.discover."""

    members: Sequence[int]
    cohesion: float
    """0 to 1; higher is tighter."""
    near_class: str | None
    shifted: bool
    """Whether it looks like `near_class` changed rather than like something new."""


@dataclass(frozen=True)
class Group:
    """A group as it is now, after people moved, merged and labelled."""

    id: int
    size: int
    copies: int
    cohesion: float
    near_class: str | None
    shifted: bool
    state: State | None
    """What all members share; None if they differ."""
    label: str | None
    states: dict[State, int]
    """Members by state."""
    labels: dict[str, int]
    """Members that bear a label, by label."""


class Change(NamedTuple):
    """What somebody did."""

    at: float
    who: str
    what: str
    items: int
    """How many were changed."""
    detail: str


class Held(NamedTuple):
    """How much is in quarantine; `bytes` counts image files, features and answers."""

    items: int
    bytes: int
    states: dict[State, int]


@dataclass(frozen=True)
class Caps:
    """How much a quarantine may hold."""

    items: int = 10_000
    bytes: int = 1024**3
    days: float = 30.0

    def __post_init__(self) -> None:
        if self.items < 1 or self.bytes < 1 or not self.days > 0:
            raise ValueError(f"caps must be positive, such as Caps(); got {self}")
