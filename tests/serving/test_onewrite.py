"""Head and body of a response in one write, in the order in which they were sent."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.types import Message
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from serving.onewrite import one_write

START: Message = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]}
BODY: Message = {"type": "http.response.body", "body": b"{}"}


class Transport:
    def __init__(self) -> None:
        self.did: list[bytes | str] = []

    def write(self, data: bytes) -> None:
        self.did.append(data)

    def close(self) -> None:
        self.did.append("closed")


def cycle(transport: Any, *, keep_alive: bool) -> RequestResponseCycle:
    """As uvicorn makes one; this fails where uvicorn has changed."""
    made = RequestResponseCycle.__new__(RequestResponseCycle)
    made.transport, made.keep_alive = transport, keep_alive
    made.scope = {"method": "POST"}  # type: ignore[typeddict-item]
    made.flow = type("Flow", (), {"write_paused": False})()  # type: ignore[assignment]
    made.disconnected = made.response_started = made.response_complete = False
    made.waiting_for_100_continue = made.access_log = False
    made.chunked_encoding, made.default_headers = None, []
    made.message_event, made.on_response = asyncio.Event(), lambda: None
    return made


@pytest.mark.parametrize("keep_alive", [True, False])
def test_head_and_body_leave_together(keep_alive: bool) -> None:
    transport = Transport()

    async def send() -> None:
        sending = cycle(transport, keep_alive=keep_alive)
        with one_write(sending.send):
            await sending.send(START)
            assert transport.did == []
            await sending.send(BODY)
        assert sending.transport is transport

    asyncio.run(send())
    written, *after = transport.did
    assert isinstance(written, bytes)
    assert written.startswith(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n")
    assert written.endswith(b"\r\n\r\n{}")
    assert after == ([] if keep_alive else ["closed"])


def test_another_server_is_left_as_it_is() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def use() -> None:
        with one_write(send):
            await send(START)
            assert sent == [START]

    asyncio.run(use())
