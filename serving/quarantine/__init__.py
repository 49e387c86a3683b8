"""The quarantine: images that the server did not know, kept for a person to label and for the next task to learn.

Importing this package is cheap: the database library is imported by `store` and `keeper`, which only a configured
quarantine needs. Nothing here needs BentoML, so training reads the same store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from serving.quarantine.records import Caps, StoreError
from serving.settings import Settings, SettingsError

if TYPE_CHECKING:
    from serving.quarantine.keeper import Keeper


def configured_address() -> tuple[str, str | None] | None:
    """The database URL and the place of the images from OPENWORLD_QUARANTINE_*; None if no quarantine is configured."""
    try:
        settings = Settings.from_environment()
    except SettingsError as error:
        raise StoreError(str(error)) from None
    return (settings.quarantine_url, settings.quarantine_images) if settings.quarantine_url else None


def keeper_of(settings: Settings) -> Keeper | None:
    """The keeper of a worker, whose thread opens the database when it is available; None without a quarantine."""
    if settings.quarantine_url is None:
        return None
    from serving.quarantine.keeper import Keeper
    from serving.quarantine.store import Store

    return Keeper(
        Store(settings.quarantine_url, settings.quarantine_images),
        caps=Caps(
            settings.quarantine_max_items,
            settings.quarantine_max_bytes,
            settings.quarantine_max_days,
            labels_expire=not settings.may_teach,
        ),
        audit_share=settings.quarantine_audit_share,
        queue=settings.quarantine_queue,
        durable=settings.quarantine_durable,
    )
