"""A server under faults: killed workers, and SIGTERM under load."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.helpers_serving import PATIENCE, Server, eventually, http_post, image_bytes, metric, serving, write_bundle

pytestmark = pytest.mark.long

RED = image_bytes()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two workers; the last test stops them."""
    tmp_path = tmp_path_factory.mktemp("pair")
    bundle = write_bundle(tmp_path / "bundle")
    # The deadline also ends requests that a test sends slowly, and a busy machine is slow.
    settings = {"OPENWORLD_WORKERS": "2", "OPENWORLD_DEADLINE": str(PATIENCE)}
    with serving(tmp_path / "home", bundle, settings=settings) as running:
        eventually(lambda: initialized(running) == 2)
        yield running


def initialized(server: Server) -> int:
    """How many workers have become ready so far."""
    return server.log.read_text().count("Service openworld initialized")


def workers(server: Server) -> list[int]:
    found = []
    for child in psutil.Process(server.process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "--worker-id" in child.cmdline():
                found.append(child.pid)
    return found


class Load:
    """Clients that send requests, each over one connection, until the server that stops accepts no more."""

    def __init__(self, url: str, clients: int = 4) -> None:
        self.answered = 0
        self.wrong: list[str] = []
        self.stopping = threading.Event()
        self._url = url
        self._threads = [threading.Thread(target=self._ask) for _ in range(clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        eventually(lambda: self.answered > 50)
        return self

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:
            thread.join()

    def _ask(self) -> None:
        with httpx.Client(base_url=self._url, timeout=10) as client:
            while True:
                try:
                    response = client.post("/predict", content=RED)
                except httpx.TransportError as error:
                    # A request on a closed or closing connection was never accepted: the client ends here.
                    if self.stopping.is_set():
                        return
                    if not isinstance(error, httpx.TimeoutException):
                        self.wrong.append(repr(error))
                    continue
                if response.status_code != 200 or response.json()["label"] != "red":
                    self.wrong.append(response.text)
                self.answered += 1


def half_sent(server: Server) -> socket.socket:
    """A request that is accepted, and waits for the rest of its body."""
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)
    head = f"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: {len(RED)}\r\nExpect: 100-continue\r\n\r\n"
    connection.sendall(head.encode())
    # The server sends this when it starts to read the body.
    assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
    connection.sendall(RED[:10])
    return connection


def rest_of(connection: socket.socket) -> bytes:
    connection.sendall(RED[10:])
    with contextlib.closing(connection), connection.makefile("rb") as answer:
        return answer.read()


def unanswered(server: Server) -> bool:
    """Whether a new request gets no answer because no worker accepts its connection."""
    try:
        return httpx.get(f"{server.url}/livez", timeout=0.5).status_code != 200
    except httpx.TransportError:
        return True


def test_a_killed_worker_comes_back_while_the_other_serves_on(pair: Server) -> None:
    victim, survivor = workers(pair)
    before = initialized(pair)
    os.kill(victim, signal.SIGKILL)
    # Until its sockets are closed, the kernel may give a new connection to the dying worker and then reset it.
    eventually(lambda: not psutil.pid_exists(victim))
    assert http_post(f"{pair.url}/predict", content=RED).json()["label"] == "red"
    eventually(lambda: initialized(pair) == before + 1)
    assert len(workers(pair)) == 2
    assert survivor in workers(pair)
    # The new worker replaces the dead one in the gauges and is not counted in addition.
    eventually(lambda: (metric(pair, "openworld_model_info"), metric(pair, "openworld_queue_limit")) == (1, 256))
    assert http_post(f"{pair.url}/predict", content=RED).json()["label"] == "red"


def test_workers_end_with_a_killed_supervisor(tmp_path: Path) -> None:
    """Otherwise they would keep the port, and no server could take it over."""
    bundle = write_bundle(tmp_path / "bundle")
    with serving(tmp_path / "home", bundle) as first:
        orphans = psutil.Process(first.process.pid).children(recursive=True)
        accepted = half_sent(first)
        first.process.kill()
        # What was accepted is still answered.
        eventually(lambda: unanswered(first))
        assert b'"label":"red"' in rest_of(accepted)
        _, alive = psutil.wait_procs(orphans, timeout=PATIENCE)
    assert alive == []
    assert "is gone: this worker ends" in first.log.read_text()
    with socket.create_server(("127.0.0.1", first.port)):
        pass


def test_sigterm_under_load_loses_nothing_that_was_accepted(pair: Server) -> None:
    accepted = [half_sent(pair) for _ in range(16)]
    with Load(pair.url) as load:
        load.stopping.set()
        pair.process.send_signal(signal.SIGTERM)
    # These requests were accepted before the server stops to accept any.
    eventually(lambda: all(unanswered(pair) for _ in range(3)))
    answers = [rest_of(connection) for connection in accepted]
    assert all(answer.startswith(b"HTTP/1.1 200 ") and b'"label":"red"' in answer for answer in answers)
    assert load.wrong == []
    assert pair.process.wait(timeout=PATIENCE) == 0
    assert "Traceback" not in pair.log.read_text()
