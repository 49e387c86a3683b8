"""Connections that send too much before, after or around a request."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterable, Iterator

import httpx
import psutil
import pytest

from tests.helpers_serving import PATIENCE, Server, eventually, http_get, image_bytes
from tests.load import megabytes, send, workers

RED = image_bytes()
CHUNKED = b"POST /predict HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n"
MEGABYTE = 1_000_000
ATTEMPTS = 4


@pytest.fixture(scope="module")
def worker(server: Server) -> psutil.Process:
    (only,) = workers(server, 1)
    return only


def small_trailers() -> Iterator[bytes]:
    line = b"a: b\r\n"
    yield from [line * (MEGABYTE // len(line))] * 50


def one_trailer() -> Iterator[bytes]:
    yield b"a: "
    yield from [b"b" * MEGABYTE] * 50


@pytest.mark.parametrize("trailers", [small_trailers, one_trailer])
def test_50_mb_of_trailers_take_neither_memory_nor_time(
    server: Server, client: httpx.Client, worker: psutil.Process, trailers: object
) -> None:
    assert callable(trailers)
    # Other work on the machine may delay a response; a server that is blocked delays one at every attempt.
    assert any(slowest_while_sending(trailers(), server, client, worker) < 1 for _ in range(ATTEMPTS))
    assert client.post("/predict", content=RED).json()["label"] == "red"


def slowest_while_sending(
    trailers: Iterable[bytes], server: Server, client: httpx.Client, worker: psutil.Process
) -> float:
    """The longest time that /livez takes between two pieces, in seconds."""
    before, slowest = megabytes([worker]), 0.0
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection:
        connection.sendall(CHUNKED)
        # The server refuses them early, and may close the connection.
        with contextlib.suppress(ConnectionError):
            for piece in trailers:
                connection.sendall(piece)
                started = time.monotonic()
                assert client.get("/livez").status_code == 200
                slowest = max(slowest, time.monotonic() - started)
    assert megabytes([worker]) - before < 50
    return slowest


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"x" * MEGABYTE,
        b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"x" * MEGABYTE,
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"A: x\r\n" * (MEGABYTE // 6),
    ],
    ids=["path", "header", "headers"],
)
def test_a_head_that_does_not_end_is_refused(server: Server, head: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(head)
        # The rest of the head may have met a closed connection, which then forgets the response.
        with contextlib.suppress(ConnectionError):
            assert connection.recv(65536).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize(
    "offer",
    [
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n",
        b"Connection: upgrade\r\nUpgrade: another\r\n",
    ],
    ids=["h2c", "another"],
)
def test_another_protocol_is_not_taken_and_the_body_is_read(server: Server, offer: bytes) -> None:
    """Some clients offer HTTP/2 with every request."""
    head = b"POST /predict HTTP/1.1\r\nHost: x\r\n" + offer
    replies = send(server.port, [head + b"Content-Length: %d\r\n\r\n" % len(RED) + RED] * 2, clients=1)
    assert [reply.json()["label"] for reply in replies] == ["red", "red"]


def test_a_long_path_is_cut_off_in_the_log(server: Server) -> None:
    assert http_get(f"{server.url}/long" + "y" * 5000).status_code == 404
    eventually(lambda: "/longyy" in server.log.read_text())
    (line,) = (line for line in server.log.read_text().splitlines() if "/longyy" in line)
    assert len(line) < 500
