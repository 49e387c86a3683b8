"""Builds the overview for the page from the store."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from serving.http.schemas import ModelName
from serving.quarantine.api import schemas
from serving.quarantine.records import Item
from serving.settings import Settings

if TYPE_CHECKING:
    from serving.quarantine.store import Store

LEARNED_FROM = 20
"""Images of a new class that `openworld learn-unknowns` needs by default."""
LATEST_CHANGES = 20


def overview(
    store: Store, *, user: str, model: ModelName, known: Sequence[str], settings: Settings, first: int
) -> schemas.Overview:
    """Groups with their first images, counts, changes and commands."""

    def first_items(group: int | None) -> tuple[schemas.ItemEntry, ...]:
        return _entries(store.items(group=group, limit=first) if first else [])

    held = store.usage()
    groups = store.groups()
    return schemas.Overview(
        user=user,
        model=model,
        known=tuple(known),
        states=held.states,
        groups=tuple(schemas.GroupEntry(**vars(group), items=first_items(group.id)) for group in groups),
        ungrouped=schemas.Ungrouped(
            size=max(0, held.items - sum(group.size for group in groups)),
            items=first_items(None),
        ),
        classes=tuple(
            schemas.NewClass(
                label=label, images=count, ready=count >= LEARNED_FROM and label not in known, in_model=label in known
            )
            for label, count in store.count_labelled().items()
        ),
        minimum=LEARNED_FROM,
        commands=commands(settings),
        changes=tuple(schemas.ChangeEntry(**change._asdict()) for change in store.changes(LATEST_CHANGES)),
    )


def item_list(store: Store, group: int | None, *, after: int, limit: int) -> schemas.ItemList:
    """At most `limit` images with larger numbers than `after`."""
    found = store.items(group=group, after=after, limit=limit + 1)
    return schemas.ItemList(items=_entries(found[:limit]), next=found[limit - 1].id if len(found) > limit else None)


def commands(settings: Settings) -> schemas.Commands:
    """The commands as typed on this machine; a URL that may hold a password is replaced by its variable."""
    url = settings.quarantine_url or ""
    where = f"--quarantine {_shown(url, 'OPENWORLD_QUARANTINE_URL')}"
    if settings.quarantine_images is not None:
        where += f" --images {_shown(settings.quarantine_images, 'OPENWORLD_QUARANTINE_IMAGES')}"
    shelf = settings.bundles
    bundle = shlex.quote(str(settings.bundle if shelf is None else shelf / "current"))
    publish = "" if shelf is None else f" --publish {shlex.quote(str(shelf))}"
    return schemas.Commands(
        discover=f"openworld discover {where} --bundle {bundle}",
        learn=f"openworld learn-unknowns RUN {where}{publish}",
    )


def _shown(place: str, variable: str) -> str:
    on_disk = place.startswith("sqlite:") or "://" not in place
    return shlex.quote(place) if on_disk else f'"${variable}"'


def _entries(items: Sequence[Item]) -> tuple[schemas.ItemEntry, ...]:
    return tuple(map(entry_of, items))


def entry_of(item: Item) -> schemas.ItemEntry:
    guess, p_value = item.answer.get("best_guess"), item.answer.get("p_value")
    answer = {
        "best_guess": guess if isinstance(guess, str) else None,
        "p_value": p_value if isinstance(p_value, float) else None,
    }
    return schemas.ItemEntry.model_validate(vars(item) | answer, extra="ignore")
