"""A response that leaves in one piece.

uvicorn writes the head of a response as soon as it has it, and the body after that: two system calls, two packets, and
a client that is woken twice. Reaches into uvicorn, whose version is pinned; other servers are left as they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from starlette.types import Send


@contextlib.contextmanager
def one_write(send: Send) -> Iterator[None]:
    """What is sent within the block is written when it ends."""
    cycle: Any = getattr(send, "__self__", None)
    transport = getattr(cycle, "transport", None)
    if transport is None:
        yield
        return
    cycle.transport = gathering = _Gathering(transport)
    try:
        yield
    finally:
        cycle.transport = transport
        gathering.flush()


class _Gathering:
    """A transport that holds back what is written."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self._held: list[bytes] = []

    def write(self, data: bytes) -> None:
        self._held.append(data)

    def flush(self) -> None:
        if self._held:
            self._transport.write(b"".join(self._held))
            self._held.clear()

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
