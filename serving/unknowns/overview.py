"""From the store to what the page shows."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from serving.logs import timestamp
from serving.quarantine import Change, Group, Item
from serving.schemas import ModelName
from serving.settings import Settings
from serving.unknowns.wire import ChangeEntry, Commands, GroupEntry, ItemEntry, ItemList, NewClass, Overview, Ungrouped

if TYPE_CHECKING:
    from serving.quarantine.store import Store

LEARNED_FROM = 20
"""Images that training.fit asks of a new class, unless told otherwise."""
LATEST_CHANGES = 20


def overview(
    store: Store, *, user: str, model: ModelName, known: Sequence[str], settings: Settings, first: int
) -> Overview:
    """Groups with their first images, and all that is told beside them."""
    held = store.held()
    groups = store.groups()
    return Overview(
        user=user,
        model=model,
        known=tuple(known),
        states=held.states,
        groups=tuple(_group(group, store.items(group=group.id, limit=first) if first else []) for group in groups),
        ungrouped=Ungrouped(
            size=max(0, held.items - sum(group.size for group in groups)),
            items=_entries(store.items(group=None, limit=first) if first else []),
        ),
        classes=tuple(
            NewClass(
                label=label,
                images=count,
                ready=count >= LEARNED_FROM and label not in known,
                in_model=label in known,
            )
            for label, count in store.count_labelled().items()
        ),
        minimum=LEARNED_FROM,
        commands=commands(settings),
        changes=tuple(map(_change, store.changes(LATEST_CHANGES))),
    )


def item_list(store: Store, group: int | None, *, after: int, limit: int) -> ItemList:
    """At most `limit` items with larger numbers than `after`."""
    found = store.items(group=group, after=after, limit=limit + 1)
    return ItemList(items=_entries(found[:limit]), next=found[limit - 1].id if len(found) > limit else None)


def commands(settings: Settings) -> Commands:
    """As they are to be typed on this machine; a URL that may hold a password is not repeated."""
    url = settings.quarantine_url or ""
    where = f"--quarantine {_shown(url, 'OPENWORLD_QUARANTINE_URL')}"
    if settings.quarantine_images is not None:
        where += f" --images {_shown(settings.quarantine_images, 'OPENWORLD_QUARANTINE_IMAGES')}"
    shelf = settings.bundles
    bundle = shlex.quote(str(settings.bundle if shelf is None else shelf / "current"))
    publish = "" if shelf is None else f" --publish {shlex.quote(str(shelf))}"
    return Commands(
        discover=f"python -m training.discover {where} --bundle {bundle}",
        learn=f"python -m training.fit --add-unknowns RUN {where}{publish}",
    )


def _shown(place: str, variable: str) -> str:
    on_disk = place.startswith("sqlite:") or "://" not in place
    return shlex.quote(place) if on_disk else f'"${variable}"'


def _group(group: Group, items: Sequence[Item]) -> GroupEntry:
    return GroupEntry(
        id=group.id,
        size=group.size,
        copies=group.copies,
        cohesion=group.cohesion,
        near_class=group.near_class,
        shifted=group.shifted,
        state=group.state,
        label=group.label,
        states=group.states,
        labels=group.labels,
        items=_entries(items),
    )


def _entries(items: Sequence[Item]) -> tuple[ItemEntry, ...]:
    return tuple(map(_entry, items))


def _entry(item: Item) -> ItemEntry:
    guess, p_value = item.answer.get("best_guess"), item.answer.get("p_value")
    return ItemEntry(
        id=item.id,
        state=item.state,
        kind=item.kind,
        group=item.group,
        label=item.label,
        labelled_by=item.labelled_by,
        labelled_at=None if item.labelled_at is None else timestamp(item.labelled_at),
        learned_in=item.learned_in,
        received_at=timestamp(item.received_at),
        seen_at=timestamp(item.seen_at),
        copies=item.copies,
        width=item.width,
        height=item.height,
        model_version=item.model_version,
        best_guess=guess if isinstance(guess, str) else None,
        p_value=p_value if isinstance(p_value, float) else None,
    )


def _change(change: Change) -> ChangeEntry:
    return ChangeEntry(
        at=timestamp(change.at), who=change.who, what=change.what, items=change.items, detail=change.detail
    )
