"""What a server does when it is hurt: killed workers, and the end under load."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
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
            if "_bentoml_impl.worker.service" in child.cmdline():
                found.append(child.pid)
    return found


@dataclass
class Load:
    """Clients that ask until they are told to stop, each with one connection."""

    url: str
    answered: int = 0
    lost: list[str] = field(default_factory=list)
    refused: int = 0
    stop: threading.Event = field(default_factory=threading.Event)

    def client(self) -> None:
        with httpx.Client(base_url=self.url, timeout=20) as client:
            while not self.stop.is_set():
                try:
                    response = client.post("/predict", content=RED)
                except (httpx.ConnectError, httpx.ConnectTimeout):
                    self.refused += 1
                    return
                except httpx.RemoteProtocolError as error:
                    # The server closed an idle connection before it took the request: nothing was accepted.
                    assert "without sending a response" in str(error)
                    self.refused += 1
                    return
                except httpx.TransportError as error:
                    self.lost.append(repr(error))
                    return
                if response.status_code != 200 or response.json()["label"] != "red":
                    self.lost.append(response.text)
                self.answered += 1


@contextlib.contextmanager
def under_load(server: Server, clients: int = 8) -> Iterator[Load]:
    load = Load(server.url)
    threads = [threading.Thread(target=load.client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        eventually(lambda: load.answered > 50, 60)
        yield load
    finally:
        load.stop.set()
        for thread in threads:
            thread.join()


def test_a_killed_worker_comes_back_while_the_other_serves_on(pair: Server) -> None:
    victim, survivor = workers(pair)
    os.kill(victim, signal.SIGKILL)
    assert httpx.post(f"{pair.url}/predict", content=RED, timeout=60).json()["label"] == "red"
    eventually(lambda: len(set(workers(pair)) - {victim}) == 2, 60)
    assert survivor in workers(pair)
    # The new one has taken the dead one's place in the gauges, and not a place beside it.
    eventually(lambda: metric(pair, "openworld_model_info") == 1 and metric(pair, "openworld_queue_limit") == 256, 60)
    assert httpx.post(f"{pair.url}/predict", content=RED).json()["label"] == "red"


def test_sigterm_under_load_loses_nothing(pair: Server) -> None:
    with under_load(pair) as load:
        pair.process.send_signal(signal.SIGTERM)
        assert pair.process.wait(timeout=30) == 0
    assert load.lost == []
    assert load.answered > 50
    assert "Traceback" not in pair.log.read_text()
