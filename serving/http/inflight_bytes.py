"""Bounds the bytes of all request bodies that a worker holds at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from serving.errors import BusyError

Reserve = Callable[[int], None]


class InflightBytes:
    """The byte budget of a worker; used on the event loop."""

    def __init__(self, limit: int) -> None:
        self.bytes = 0
        self._limit = limit

    @contextlib.contextmanager
    def request(self) -> Iterator[Reserve]:
        """The reservations of one request, which are released when the block ends.

        The function that it yields is called for every chunk that is kept; it raises a BusyError if the budget is
        exhausted.
        """
        own = 0

        def reserve(size: int) -> None:
            nonlocal own
            # A body that is larger than the whole budget is accepted if no other request holds bytes, because it could
            # never be accepted otherwise.
            if self.bytes > own and self.bytes + size > self._limit:
                # It may try again after a second: only a few large uploads fill the budget, and they finish soon.
                allowed = f"{self._limit} bytes at a time in this worker"
                raise BusyError(
                    "too many bytes in flight", got=f"{size} more, while {self.bytes} are in use", allowed=allowed
                )
            own += size
            self.bytes += size

        try:
            yield reserve
        finally:
            self.bytes -= own
