"""Notes of the exporter on standard error."""

import sys
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

from serving.bundle.terminal import escaped

SILENT_SECONDS = 10.0
"""Work that takes longer reports its progress."""

Item = TypeVar("Item")


def note(text: str) -> None:
    print(f"note: {escaped(text)}", file=sys.stderr, flush=True)


def counted(items: Sequence[Item], what: str) -> Iterator[Item]:
    """The same items; slow ones print a line every few seconds with the number that is done."""
    reported = time.monotonic()
    for done, item in enumerate(items):
        if time.monotonic() - reported >= SILENT_SECONDS:
            note(f"{what}: {done} of {len(items)}")
            reported = time.monotonic()
        yield item
