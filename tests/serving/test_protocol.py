"""Connections: what comes before a request is one, what comes after its answer, and offers of other protocols."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.server import ServerState

from serving import protocol
from serving.protocol import LARGEST_HEAD, BoundedProtocol
from serving.schemas import ErrorAnswer
from tests.helpers_serving import Server, eventually, image_bytes
from tests.load import send

RED = image_bytes()
GET = b"GET /model HTTP/1.1\r\nHost: x\r\n\r\n"
UPGRADES = {
    "h2c": b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n",
    "websocket": b"Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n",
}


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Say what came: method, path and body; `/deny` is answered before the body is read."""
    body, more = b"", scope["type"] == "http" and scope["path"] != "/deny"
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    said = b"%b %b %b;" % (scope["method"].encode(), scope["path"].encode(), body)
    length = (b"content-length", b"%d" % len(said))
    await send({"type": "http.response.start", "status": 200, "headers": [length]})
    await send({"type": "http.response.body", "body": said})


Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[Any]]


def talk(body: Talk, *, keep_alive: float = 0.2) -> Any:
    """Run a client's side of one connection."""

    async def main() -> Any:
        config = Config(echo, ws="none", log_config=None)
        config.timeout_keep_alive = keep_alive  # type: ignore[assignment]
        state = ServerState()
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: BoundedProtocol(config, state, {}), "127.0.0.1", 0)
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            try:
                return await body(reader, writer)
            finally:
                writer.close()

    return asyncio.run(asyncio.wait_for(main(), 20))


def said_to(*pieces: bytes, pause: float = 0.0) -> bytes:
    """All that comes back until the server closes the connection."""

    async def body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause)
        return await reader.read()

    return bytes(talk(body))


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"x" * LARGEST_HEAD + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"x" * LARGEST_HEAD + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"A: x\r\n" * (LARGEST_HEAD // 6) + b"\r\n",
        b"\r\n" * (LARGEST_HEAD // 2),
    ],
    ids=["path", "header", "headers", "empty lines"],
)
@pytest.mark.parametrize("before", [b"", GET], ids=["first", "second"])
def test_a_head_that_is_too_large_is_refused(before: bytes, head: bytes) -> None:
    said = said_to(before, head, pause=0.02)
    assert said.count(b"HTTP/1.1 200") == (1 if before else 0)
    start, _, body = said[said.index(b"HTTP/1.1 431 ") :].partition(b"\r\n\r\n")
    assert b"connection: close" in start
    assert b"x-openworld-schema: 1" in start
    assert ErrorAnswer.model_validate_json(body).error.code == "head_too_large"


def test_a_head_has_room() -> None:
    head = b"GET / HTTP/1.1\r\nA: " + b"x" * (LARGEST_HEAD - 100) + b"\r\n\r\n"
    assert said_to(*[head] * 3).count(b"HTTP/1.1 200") == 3


def test_bodies_and_requests_in_a_row_are_no_heads() -> None:
    body = bytes(4 * LARGEST_HEAD)
    post = b"POST /deny HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    assert said_to(post, GET * 2500, post).count(b"HTTP/1.1 200") == 2502


@pytest.mark.parametrize("pieces", [[], [GET[:9]], [GET[i : i + 1] for i in range(20)]], ids=["none", "half", "slowly"])
@pytest.mark.parametrize("before", [[], [GET]], ids=["first", "second"])
def test_a_head_has_so_much_time(monkeypatch: pytest.MonkeyPatch, before: list[bytes], pieces: list[bytes]) -> None:
    """Bytes that come now and then do not buy more of it."""
    monkeypatch.setattr(protocol, "SLOWEST_HEAD", 0.2)
    started = time.monotonic()
    with contextlib.suppress(ConnectionError):
        assert said_to(*before, *pieces, pause=0.02).count(b"HTTP/1.1 200") == len(before)
    assert 0.15 < time.monotonic() - started < 3


def test_an_idle_connection_is_kept_for_as_long_as_uvicorn_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "SLOWEST_HEAD", 0.1)

    async def body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(3):
            writer.write(GET)
            assert (await reader.readuntil(b";")).endswith(b"GET /model ;")
            await asyncio.sleep(0.3)

    talk(body, keep_alive=10)


@pytest.mark.parametrize("offer", UPGRADES)
@pytest.mark.parametrize("size", [1, 40, 10_000])
@pytest.mark.parametrize("chunked", [False, True])
def test_another_protocol_is_not_taken_and_the_body_is_read(offer: str, size: int, chunked: bool) -> None:
    inner = b"GET /inner HTTP/1.1\r\n\r\n"
    head = b"POST /outer HTTP/1.1\r\nHost: x\r\n" + UPGRADES[offer]
    if chunked:
        request = head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(inner), inner)
    else:
        request = head + b"Content-Length: %d\r\n\r\n" % len(inner) + inner
    content = request + GET
    said = said_to(*(content[start : start + size] for start in range(0, len(content), size)))
    assert said.count(b"HTTP/1.1 200") == 2
    assert b"POST /outer " + inner + b";" in said
    assert said.endswith(b"GET /model ;")


@pytest.mark.parametrize("sent", [b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n", b"junk\r\n\r\n", b"GET\x00 /\r\n\r\n"])
def test_what_is_no_request_gets_an_error_of_the_usual_shape(sent: bytes) -> None:
    start, _, body = said_to(sent).partition(b"\r\n\r\n")
    assert start.startswith(b"HTTP/1.1 400 ")
    assert ErrorAnswer.model_validate(json.loads(body)).error.code == "malformed_request"


DENIED = b"POST /deny HTTP/1.1\r\nContent-Length: %d\r\n\r\n"


def test_a_connection_is_idle_again_once_an_unwanted_body_ended() -> None:
    """It is closed, and takes another request until then."""
    assert said_to(DENIED % 3, b"abc", pause=0.05).count(b"HTTP/1.1 200") == 1
    assert said_to(DENIED % 3, b"abc", GET, pause=0.05).count(b"HTTP/1.1 200") == 2


def test_an_unwanted_body_has_so_much_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "SLOWEST_UNWANTED", 0.2)
    started = time.monotonic()
    with contextlib.suppress(ConnectionError):
        said_to(DENIED % 1000, *[b"a"] * 50, pause=0.02)
    assert time.monotonic() - started < 4


def test_an_unwanted_body_has_so_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "MOST_UNWANTED", 100_000)

    async def body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(DENIED % 10**9)
        assert b"HTTP/1.1 200" in await reader.readuntil(b";")
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 10**7:
                writer.write(bytes(10_000))
                await writer.drain()
                await asyncio.sleep(0.001)
                sent += 10_000
        assert 90_000 <= sent < 10**7

    talk(body)


def test_workers_speak_it(server: Server) -> None:
    """A client that offers HTTP/2, as some do with every request, gets its answer; an endless head does not."""
    head = b"POST /predict HTTP/1.1\r\nHost: x\r\n" + UPGRADES["h2c"]
    (reply,) = send(server.port, [head + b"Content-Length: %d\r\n\r\n" % len(RED) + RED], clients=1)
    assert reply.json()["label"] == "red"
    assert httpx.get(f"{server.url}/model", headers={"a": "x" * LARGEST_HEAD}).status_code == 431


def test_a_long_path_is_cut_off_in_the_log(server: Server) -> None:
    assert httpx.get(f"{server.url}/long" + "y" * 5000).status_code == 404
    eventually(lambda: "/longyy" in server.log.read_text())
    (line,) = (line for line in server.log.read_text().splitlines() if "/longyy" in line)
    assert len(line) < 500
