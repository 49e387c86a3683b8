"""Notices a client that went away while it waits, so that its images cost nothing more."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Self

from starlette.types import Receive

SOON = 0.05
"""Most answers are there before this many seconds, and to listen for a client costs more than to answer it."""


class Watch:
    """While it is entered: cancels the futures if the client hangs up, and says so in `gone`."""

    def __init__(self, receive: Receive, futures: Sequence[asyncio.Future[Any]]) -> None:
        self.gone = False
        self._receive = receive
        self._futures = futures
        self._loop = asyncio.get_running_loop()
        self._listening: asyncio.Task[None] | None = None

    def __enter__(self) -> Self:
        self._timer = self._loop.call_later(SOON, self._listen)
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        if self._listening is not None:
            self._listening.cancel()
            # A task that was cancelled leads back here, and to the request.
            self._listening = None

    def _listen(self) -> None:
        self._listening = self._loop.create_task(self._until_gone())

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        for future in self._futures:
            future.cancel()
