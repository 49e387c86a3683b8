"""Servers that are compared: one worker each, one thread for the graph, no more than their own work at a time."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import httpx
import psutil

from tests.helpers_serving import ROOT, Server, free_port, serving
from tests.load import http_request

PATIENCE = 60.0


@dataclass(frozen=True)
class Contestant:
    name: str
    start: Callable[[Path, Path], AbstractContextManager[Server]]
    request: Callable[[bytes], bytes]
    package: str | None = None

    @property
    def installed(self) -> bool:
        return self.package is None or find_spec(self.package) is not None


def _ours(home: Path, bundle: Path) -> AbstractContextManager[Server]:
    return serving(home, bundle, settings={"OPENWORLD_WORKERS": "1", "OPENWORLD_THREADS": "1"})


def _fastapi(home: Path, bundle: Path) -> AbstractContextManager[Server]:
    fast = ["--loop", "uvloop", "--http", "httptools", "--no-access-log", "--log-level", "warning"]
    app = ["--factory", "tests.benchmarks.bare_fastapi:make_app"]
    return _running(home, bundle, lambda port: ["uvicorn", *app, "--host", "127.0.0.1", "--port", str(port), *fast])


def _litserve(home: Path, bundle: Path) -> AbstractContextManager[Server]:
    return _running(home, bundle, lambda port: ["tests.benchmarks.bare_litserve", str(port)])


def _raw(image: bytes) -> bytes:
    return http_request("/predict", image)


def _json(image: bytes) -> bytes:
    return http_request(
        "/predict", json.dumps({"image": base64.b64encode(image).decode()}).encode(), "application/json"
    )


FASTAPI = "bare FastAPI"
OURS = "openworld"
CONTESTANTS = (
    Contestant(FASTAPI, _fastapi, _raw, "fastapi"),
    Contestant(OURS, _ours, _raw),
    # It takes no raw body.
    Contestant("LitServe", _litserve, _json, "litserve"),
)


@contextlib.contextmanager
def _running(home: Path, bundle: Path, module: Callable[[int], list[str]]) -> Iterator[Server]:
    """A server that is ready, and gone afterwards with all that it started."""
    port = free_port()
    home.mkdir(parents=True, exist_ok=True)
    log = home / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *module(port)],
            cwd=ROOT,
            env={**os.environ, "BENCH_BUNDLE": str(bundle)},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Server(f"http://127.0.0.1:{port}", port, log, process)
    try:
        _wait_until_ready(server)
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
        # What it left behind in its own session.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_until_ready(server: Server) -> None:
    deadline = time.monotonic() + PATIENCE
    while server.process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{server.url}/readyz", timeout=5).status_code == 200:
                return
        time.sleep(0.05)
    raise RuntimeError(f"server not ready, exit code {server.process.poll()}:\n{server.log.read_text()}")


def cpu_seconds(server: Server) -> float:
    """Of a server and all its processes, since they started."""
    parent = psutil.Process(server.process.pid)
    times = [one.cpu_times() for one in (parent, *parent.children(recursive=True))]
    return sum(one.user + one.system for one in times)
