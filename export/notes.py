"""What the exporter says beside its result, on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

SILENT_SECONDS = 10.0
"""How long work may take before it says how far it has come."""

Item = TypeVar("Item")


def note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr, flush=True)


def counted(items: Sequence[Item], what: str) -> Iterator[Item]:
    """The same items; where they take long, a line now and then says how many are done."""
    said = time.monotonic()
    for done, item in enumerate(items):
        if time.monotonic() - said >= SILENT_SECONDS:
            note(f"{what}: {done} of {len(items)}")
            said = time.monotonic()
        yield item
