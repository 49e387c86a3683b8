"""A server with an API key, a queue of one image and a short deadline; and how a server stops."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from serving.client import Client, ServiceError
from tests.helpers_serving import PATIENCE, Server, eventually, http_get, http_post, image_bytes, metric, serving

KEY = "a-key-of-some-length"
RED = image_bytes()
DEADLINE = 15.0
"""Seconds: far more than any of these requests takes, also on a slow machine. One request waits for it meanwhile."""


@pytest.fixture(scope="module")
def strict(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    settings = {"OPENWORLD_API_KEY": KEY, "OPENWORLD_QUEUE": "1", "OPENWORLD_DEADLINE": str(DEADLINE)}
    with serving(tmp_path_factory.mktemp("home"), bundle, settings=settings) as running:
        yield running


@pytest.fixture(scope="module", autouse=True)
def unfinished(strict: Server) -> Iterator[socket.socket]:
    """A request that is never sent to its end; the other tests run while its time runs out."""
    with half_sent(strict) as connection:
        yield connection


def post(server: Server, content: bytes = RED) -> httpx.Response:
    return httpx.post(f"{server.url}/predict", content=content, headers={"x-api-key": KEY}, timeout=PATIENCE)


@contextlib.contextmanager
def half_sent(server: Server, key: str = KEY) -> Iterator[socket.socket]:
    """Send a request with an incomplete body, which is accepted and read so far."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection:
        headers = f"X-Api-Key: {key}\r\nContent-Length: {len(RED)}\r\nExpect: 100-continue\r\n\r\n"
        connection.sendall(f"POST /predict HTTP/1.1\r\nHost: x\r\n{headers}".encode())
        # The server sends this when it starts to read the body.
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(RED[:10])
        yield connection


def received(connection: socket.socket) -> tuple[int, dict[str, Any]]:
    content = b""
    while b"\r\n\r\n" not in content or not content.endswith(b"}"):
        chunk = connection.recv(65536)
        assert chunk, content
        content += chunk
    head, _, body = content.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


@pytest.mark.parametrize("path", ["/predict", "/predict_many"])
@pytest.mark.parametrize(
    "headers",
    [{}, {"x-api-key": KEY[:-1]}, {"x-api-key": ""}, {"authorization": f"Basic {KEY}"}, {"authorization": "Bearer"}],
)
def test_without_the_key_there_are_no_predictions(strict: Server, path: str, headers: dict[str, str]) -> None:
    response = http_post(f"{strict.url}{path}", content=RED, headers=headers)
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "unauthorized"
    assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    "headers", [{"x-api-key": KEY}, {"authorization": f"Bearer {KEY}"}, {"authorization": f"bearer  {KEY}"}]
)
def test_with_the_key_there_are(strict: Server, headers: dict[str, str]) -> None:
    assert http_post(f"{strict.url}/predict", content=RED, headers=headers).json()["label"] == "red"


def test_the_typed_client_sends_the_key(strict: Server) -> None:
    with Client(strict.url, api_key=KEY) as client:
        assert client.predict(RED).label == "red"
        assert client.drift().unknown.high <= 1.0
    for asked in (lambda client: client.predict(RED), Client.drift):
        with Client(strict.url) as client, pytest.raises(ServiceError) as caught:
            asked(client)
        assert (caught.value.code, caught.value.status) == ("unauthorized", 401)


@pytest.mark.parametrize("path", ["/predict%0A", "/predict_many%0A", "/admin/status%0A", "/unknowns%0A"])
def test_a_line_break_in_the_path_opens_nothing(strict: Server, path: str) -> None:
    assert http_post(f"{strict.url}{path}", content=RED).status_code == 404


def test_what_is_not_a_prediction_needs_no_key(strict: Server) -> None:
    for path in ("/", "/model", "/readyz", "/metrics", "/docs.json"):
        assert http_get(f"{strict.url}{path}").status_code == 200


def test_a_full_queue_answers_503_at_once(strict: Server) -> None:
    large = image_bytes(size=(3000, 3000))

    def meet() -> httpx.Response | None:
        """The response for a small image while a large one fills the queue; None if it came too late."""
        first = other.submit(post, strict, content=large)
        eventually(lambda: first.done() or metric(strict, "openworld_queue_depth") == 1)
        response = post(strict)
        assert http_get(f"{strict.url}/readyz").status_code == 200
        assert first.result().json()["label"] == "red"
        return response if response.status_code != 200 else None

    with ThreadPoolExecutor(1) as other:
        response = eventually(meet)
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "busy"
    assert int(response.headers["retry-after"]) >= 1
    assert post(strict).json()["label"] == "red"
    eventually(lambda: metric(strict, "openworld_rejected_total", reason="busy") == 1)


def test_an_incomplete_body_does_not_block_others(strict: Server) -> None:
    """The queue holds one image, and only a complete upload takes the place."""
    with half_sent(strict) as slow, half_sent(strict):
        assert metric(strict, "openworld_queue_depth") == 0
        assert post(strict).json()["label"] == "red"
        slow.sendall(RED[10:])
        status, answer = received(slow)
        assert (status, answer["label"]) == (200, "red")


def test_a_client_that_goes_away_is_noticed(strict: Server) -> None:
    before = metric(strict, "openworld_rejected_total", reason="client_gone")
    with half_sent(strict):
        pass
    eventually(lambda: metric(strict, "openworld_rejected_total", reason="client_gone") == before + 1)
    assert post(strict).status_code == 200


def test_the_key_is_in_no_log(strict: Server) -> None:
    for given in (KEY, KEY[:-1]):
        http_post(f"{strict.url}/predict", content=RED, headers={"authorization": f"Bearer {given}"})
    eventually(lambda: "unauthorized" in strict.log.read_text())
    assert KEY not in strict.log.read_text()
    assert KEY[:-1] not in strict.log.read_text()


def test_the_deadline_ends_a_request(strict: Server, unfinished: socket.socket) -> None:
    status, answer = received(unfinished)
    assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
    assert post(strict).json()["label"] == "red"


def stuck(log: Path) -> bool:
    """Whether some of the answers were sent, and no further one within half a second."""
    before = log.read_text().count("/docs.json")
    time.sleep(0.5)
    return 0 < before == log.read_text().count("/docs.json") < 1000


@pytest.mark.long
def test_a_client_that_stops_reading_does_not_hold_up_the_end(bundle: Path, tmp_path: Path) -> None:
    """Answers that exceed all socket buffers cannot be sent; the deadline ends the wait."""
    with (
        serving(tmp_path / "home", bundle, settings={"OPENWORLD_DEADLINE": "0.5"}) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection,
    ):
        connection.setblocking(False)
        ask = b"GET /docs.json HTTP/1.1\r\nHost: x\r\n\r\n"
        with contextlib.suppress(BlockingIOError):
            # More answers than the socket buffers hold, but few enough requests for the server to read them all.
            for _ in range(1000):
                connection.send(ask)
        eventually(lambda: stuck(server.log))
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=PATIENCE) == 0
