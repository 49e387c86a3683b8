"""The types and errors of the quarantine. Does not import the database library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    # The client uses these types too, and must not need numpy.
    import numpy as np
    from numpy.typing import NDArray

ItemKind = Literal["unknown", "audit", "example"]
"""Why an image was kept: it was unknown, it was known and sampled for an audit, or a person gave it as an example."""

ItemState = Literal["new", "named", "known", "junk", "learned"]
"""Not labelled yet; named as a new class; shows a class of the model; useless; named and since learned."""


class StoreError(Exception):
    """The quarantine cannot do what was requested; the message has the reason."""


class UnknownIdError(StoreError):
    """The item or group does not exist (any more)."""


class LabelError(StoreError):
    """A label or a person's name that cannot be used."""


class LearnedError(StoreError):
    """A label that a model has learned already and that can no longer be changed."""


class DamagedItemError(StoreError):
    """An item whose row or image file was changed from outside."""


class UnavailableError(StoreError):
    """The database or the image storage is unavailable; the same request may work later."""

    def __init__(self, problem: str, *, part: Literal["database", "images"]) -> None:
        super().__init__(problem)
        self.part = part


class Arrival(NamedTuple):
    """An answered image that is offered to the quarantine."""

    content: bytes
    kind: ItemKind
    received_at: float
    """Seconds since the epoch."""
    model_version: str
    answer: dict[str, Any]
    features: NDArray[np.float32]
    """The standardised features of all tasks, concatenated: [D]."""
    when_stored: Callable[[str | None], None] | None = None
    """Called from any thread once it is durable (None), or with the reason why it never will be."""


class Added(NamedTuple):
    """The result of adding arrivals."""

    kept: list[int]
    """Ids of the new items."""
    copies: int
    """Arrivals that were counted on an existing item."""
    ids: list[int]
    """The item of each arrival, new or existing, in order."""


@dataclass(frozen=True)
class Item:
    """One image in quarantine."""

    id: int
    state: ItemState
    kind: ItemKind
    group: int | None
    label: str | None
    labelled_by: str | None
    labelled_at: float | None
    learned_in: str | None
    """The version of the model that learned it."""
    received_at: float
    seen_at: float
    """When it was last received; equal to `received_at` unless it was received again."""
    model_version: str
    copies: int
    """How often it was received."""
    width: int
    height: int
    size: int
    """Bytes of the image file."""
    media_type: str
    answer: dict[str, Any]
    features: NDArray[np.float32]
    damage: str | None = None
    """What is wrong with its row, if something else has changed it; then only its id can be trusted."""
    digest: str = ""
    """The SHA-256 of the image file."""


class Outlined(NamedTuple):
    """The few columns of an item that a map shows."""

    id: int
    group: int | None
    state: ItemState
    label: str | None


class FoundGroup(NamedTuple):
    """Similar items, as found by `openworld discover`."""

    members: Sequence[int]
    cohesion: float
    """0 to 1; higher is tighter."""
    near_class: str | None
    shifted: bool
    """Whether it looks like a changed `near_class` rather than like a new class."""


@dataclass(frozen=True)
class ItemGroup:
    """A group in its present state, after people moved, merged and labelled items."""

    id: int
    size: int
    copies: int
    cohesion: float
    near_class: str | None
    shifted: bool
    state: ItemState | None
    """The state of all members; None if they differ."""
    label: str | None
    states: dict[ItemState, int]
    """Members by state."""
    labels: dict[str, int]
    """Labelled members by label."""


class Example(NamedTuple):
    """A labelled item, without its answer and features."""

    id: int
    digest: str
    label: str | None
    state: ItemState
    labelled_by: str | None
    labelled_at: float | None
    size: int
    """Bytes of the image file."""


class Change(NamedTuple):
    """An entry of the change log."""

    at: float
    who: str
    what: str
    items: int
    """Number of changed items."""
    detail: str


class Usage(NamedTuple):
    """How much a quarantine stores; `bytes` counts image files, features and answers."""

    items: int
    bytes: int
    states: dict[ItemState, int]


@dataclass(frozen=True)
class Caps:
    """The limits of a quarantine."""

    items: int = 10_000
    bytes: int = 1024**3
    days: float = 30.0
    labels_expire: bool = True
    """Whether `days` holds for labelled items as well. A server that is taught learns from them again and again."""

    def __post_init__(self) -> None:
        if self.items < 1 or self.bytes < 1 or not self.days > 0:
            raise ValueError(f"caps must be positive, such as Caps(); got {self}")
