"""Many clients at once over raw persistent HTTP/1.1 connections, light enough to share the server's machine."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import psutil
import uvloop

from tests.helpers_serving import PATIENCE, Server, eventually


@dataclass(frozen=True, slots=True)
class Reply:
    """A response and its times."""

    number: int
    status: int
    head: bytes
    body: bytes
    sent: float
    seconds: float

    def header(self, name: str) -> str | None:
        for line in self.head.split(b"\r\n")[1:]:
            found, _, value = line.partition(b":")
            if found.strip().lower() == name.encode():
                return value.strip().decode("latin-1")
        return None

    def json(self) -> Any:
        return json.loads(self.body)


def http_request(path: str, body: bytes, content_type: str = "application/octet-stream", extra: str = "") -> bytes:
    """A whole POST, ready to be written."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
    return f"{head}{extra}\r\n".encode("latin-1") + body


def repeat_for(seconds: float, *requests: bytes) -> Iterator[bytes]:
    """Cycle through the requests until the time is over."""
    until = time.perf_counter() + seconds
    for request in itertools.cycle(requests):
        if time.perf_counter() >= until:
            return
        yield request


def send(
    port: int, requests: Iterable[bytes], *, clients: int, after: Callable[[Reply], float] | None = None
) -> list[Reply]:
    """Send every request once from this many clients, each of which waits for its answer; returns the replies.

    `after` returns the seconds that a client waits before its next request.
    """
    return uvloop.run(_send(port, requests, clients, after))


async def _send(
    port: int, requests: Iterable[bytes], clients: int, after: Callable[[Reply], float] | None
) -> list[Reply]:
    numbered = enumerate(requests)
    replies: list[Reply] = []

    async def client() -> None:
        connection = await _Connection.open(port)
        try:
            for number, request in numbered:
                if connection.is_closing:
                    connection = await _Connection.open(port)
                reply = await connection.ask(number, request)
                replies.append(reply)
                if after is not None and (pause := after(reply)):
                    await asyncio.sleep(pause)
        finally:
            connection.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client())
    return replies


class _Connection(asyncio.Protocol):
    """One connection of a client. It is closed after a response that says so, or by the server."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._buffer = b""
        self._waiting: asyncio.Future[tuple[bytes, bytes]] | None = None
        self._head_only = False

    @classmethod
    async def open(cls, port: int) -> _Connection:
        # Each has its own object: one with much left to send may be lost long after it was closed.
        _, connection = await asyncio.get_running_loop().create_connection(cls, "127.0.0.1", port)
        return connection

    @property
    def is_closing(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    async def ask(self, number: int, request: bytes) -> Reply:
        loop = asyncio.get_running_loop()
        assert self._transport is not None
        self._buffer, self._waiting = b"", loop.create_future()
        self._head_only = request.startswith(b"HEAD ")
        sent = time.perf_counter()
        self._transport.write(request)
        timer = loop.call_later(PATIENCE, self._transport.abort)
        try:
            head, body = await self._waiting
        finally:
            timer.cancel()
        return Reply(number, int(head[9:12]), head, body, sent, time.perf_counter() - sent)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, found, body = self._buffer.partition(b"\r\n\r\n")
        if not found or self._waiting is None or self._waiting.done():
            return
        lower = head.lower()
        start = lower.find(b"\r\ncontent-length:")
        if self._head_only:
            complete = True
        elif start >= 0:
            complete = len(body) >= int(lower[start + 17 :].partition(b"\r\n")[0])
        elif b"\r\ntransfer-encoding: chunked" in lower:
            # The chunks are not joined: only the status of such a response is of interest.
            complete = body.endswith(b"0\r\n\r\n")
        else:
            raise AssertionError(f"an answer of unknown length: {head!r}")
        if complete:
            if b"\r\nconnection: close" in lower and self._transport is not None:
                self._transport.close()
            self._waiting.set_result((head, body))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(ConnectionError(f"no answer: {exc or 'the server hung up'}"))


@dataclass(frozen=True)
class Figures:
    """Answered requests: their rate per second, and their latency in milliseconds."""

    rate: float
    p50: float
    p99: float

    @classmethod
    def of(cls, replies: list[Reply], status: int = 200) -> Figures:
        good = [reply for reply in replies if reply.status == status]
        assert good, f"no answer of status {status} among {len(replies)}"
        milliseconds = np.array([reply.seconds for reply in good]) * 1000
        span = max(reply.sent + reply.seconds for reply in replies) - min(reply.sent for reply in replies)
        p50, p99 = np.percentile(milliseconds, [50, 99])
        return cls(len(good) / span, float(p50), float(p99))

    @classmethod
    def median(cls, rounds: list[Figures]) -> Figures:
        return cls(*(float(np.median([getattr(one, name) for one in rounds])) for name in ("rate", "p50", "p99")))


def workers(server: Server, count: int) -> list[psutil.Process]:
    """Wait for this many worker processes and return them."""
    parent = psutil.Process(server.process.pid)

    def found() -> list[psutil.Process]:
        below = [one for one in parent.children() if "worker" in " ".join(one.cmdline())]
        return sorted(below, key=lambda one: one.pid) if len(below) == count else []

    return eventually(found)


def megabytes(processes: Iterable[psutil.Process]) -> float:
    """Resident memory of the largest worker."""
    return max(one.memory_info().rss for one in processes) / 1e6


def listening(server: Server) -> set[str]:
    """The addresses that a server's processes listen on, for requests."""
    parent = psutil.Process(server.process.pid)
    sockets = [found for process in (parent, *parent.children(recursive=True)) for found in process.net_connections()]
    return {found.laddr.ip for found in sockets if found.laddr and found.laddr.port == server.port and not found.raddr}
