"""Notices a client that disconnects while it waits, so that no more work is done for it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Self

from starlette.types import Receive

LISTEN_AFTER = 0.05
"""Seconds before the watcher listens: most answers are faster, and listening costs more than answering them."""


class DisconnectWatcher:
    """While it is entered, it cancels the futures if the client disconnects, and sets `disconnected`."""

    def __init__(self, receive: Receive | None, futures: Sequence[asyncio.Future[Any]]) -> None:
        self.disconnected = False
        self._receive = receive
        self._futures = futures
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    def __enter__(self) -> Self:
        if self._receive is not None:
            self._timer = asyncio.get_running_loop().call_later(LISTEN_AFTER, self._listen, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
            # A cancelled task refers to this object and to the request: break the cycle.
            self._task = None

    def _listen(self, receive: Receive) -> None:
        self._task = asyncio.get_running_loop().create_task(self._wait_for_disconnect(receive))

    async def _wait_for_disconnect(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.disconnected = True
        for future in self._futures:
            future.cancel()
