"""How many bytes of request bodies a worker holds: the bound for all of them together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from serving.errors import BusyError

SOON = 1
"""Seconds after which there may be room again: the bodies that fill it are as large as they are few."""

Take = Callable[[int], None]


class Held:
    """Used on the event loop."""

    def __init__(self, limit: int) -> None:
        self.bytes = 0
        self._limit = limit

    @contextlib.contextmanager
    def share(self) -> Iterator[Take]:
        """One request's part of it until the block ends: to be called for every piece that is kept, or a BusyError."""
        own = 0

        def take(size: int) -> None:
            nonlocal own
            # More than fits is still taken when nobody else has any: it could never be answered otherwise.
            if self.bytes > own and self.bytes + size > self._limit:
                raise BusyError(
                    "too many bytes in the works",
                    got=f"{size} more beside {self.bytes}",
                    allowed=f"{self._limit} bytes at a time in this worker",
                    retry_after=SOON,
                )
            own += size
            self.bytes += size

        try:
            yield take
        finally:
            self.bytes -= own
