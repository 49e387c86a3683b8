"""What a server does when it is hurt: killed workers, and the end under load."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.helpers_serving import Server, eventually, image_bytes, metric, serving, write_bundle

RED = image_bytes()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Server]:
    bundle = write_bundle(tmp_path / "bundle")
    with serving(tmp_path / "home", bundle, settings={"OPENWORLD_WORKERS": "2"}) as running:
        eventually(lambda: len(workers(running)) == 2 and metric(running, "openworld_queue_limit") == 256)
        yield running


def workers(server: Server) -> list[int]:
    found = []
    for child in psutil.Process(server.process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "serving.worker" in child.cmdline():
                found.append(child.pid)
    return found


class Load:
    """Clients that ask, each over one connection, until the server takes no more requests."""

    def __init__(self, url: str, clients: int = 4) -> None:
        self.answered = 0
        self.wrong: list[str] = []
        self._url = url
        self._threads = [threading.Thread(target=self._ask) for _ in range(clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        eventually(lambda: self.answered > 50, 60)
        return self

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:
            thread.join()

    def _ask(self) -> None:
        # A request that meets a closed or a closing door was never accepted: that is where a client ends.
        with httpx.Client(base_url=self._url, timeout=5) as client, contextlib.suppress(httpx.TransportError):
            while True:
                response = client.post("/predict", content=RED)
                if response.status_code != 200 or response.json()["label"] != "red":
                    self.wrong.append(response.text)
                self.answered += 1


def half_sent(server: Server) -> socket.socket:
    """A request that is accepted, and waits for the rest of its body."""
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    head = f"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: {len(RED)}\r\nExpect: 100-continue\r\n\r\n"
    connection.sendall(head.encode())
    # So speaks whoever is about to read the body.
    assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
    connection.sendall(RED[:10])
    return connection


def rest_of(connection: socket.socket) -> bytes:
    connection.sendall(RED[10:])
    with contextlib.closing(connection), connection.makefile("rb") as answer:
        return answer.read()


def connected(server: Server, pid: int) -> int:
    """How many connections a worker has accepted."""
    with contextlib.suppress(psutil.NoSuchProcess):
        found = psutil.Process(pid).net_connections("tcp4")
        return sum(one.laddr.port == server.port and one.status == psutil.CONN_ESTABLISHED for one in found)
    return 0


def refused(server: Server) -> bool:
    """Whether a new connection is turned away at once; one that hangs is an error."""
    with socket.socket() as probe:
        probe.settimeout(5)
        return probe.connect_ex(("127.0.0.1", server.port)) == errno.ECONNREFUSED


def test_connections_that_come_together_are_spread_over_the_workers(pair: Server) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(socket.create_connection(("127.0.0.1", pair.port), timeout=30))
        eventually(lambda: sum(connected(pair, pid) for pid in workers(pair)) == 40)
        # The kernel throws a coin for each: fewer than 5 of 40 come up once in ten million times.
        assert min(connected(pair, pid) for pid in workers(pair)) >= 5


def test_a_killed_worker_comes_back_while_the_other_serves_on(pair: Server) -> None:
    victim, survivor = workers(pair)
    os.kill(victim, signal.SIGKILL)
    # Until the kernel has closed its sockets, it may still give a new connection to the dying one, and reset it then.
    eventually(lambda: not psutil.pid_exists(victim))
    assert httpx.post(f"{pair.url}/predict", content=RED, timeout=60).json()["label"] == "red"
    eventually(lambda: pair.log.read_text().count("Service openworld initialized") == 3, 60)
    assert len(workers(pair)) == 2
    assert survivor in workers(pair)
    # The new one has taken the dead one's place in the gauges, and not a place beside it.
    assert (metric(pair, "openworld_model_info"), metric(pair, "openworld_queue_limit")) == (1, 256)
    assert httpx.post(f"{pair.url}/predict", content=RED).json()["label"] == "red"


def test_sigterm_under_load_loses_nothing_that_was_accepted(pair: Server) -> None:
    accepted = [half_sent(pair) for _ in range(16)]
    with Load(pair.url) as load:
        pair.process.send_signal(signal.SIGTERM)
    # All of the load's clients have been turned away, so the server is ending; yet these it had accepted.
    assert all(refused(pair) for _ in range(10))
    answers = [rest_of(connection) for connection in accepted]
    assert all(answer.startswith(b"HTTP/1.1 200 ") and b'"label":"red"' in answer for answer in answers)
    assert load.wrong == []
    assert pair.process.wait(timeout=30) == 0
    assert "Traceback" not in pair.log.read_text()
