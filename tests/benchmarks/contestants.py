"""The compared servers: one worker each, one thread for the graph, one request at a time."""

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
from functools import partial
from pathlib import Path

import httpx
import psutil

from tests.helpers_serving import ROOT, Server, free_port, serving
from tests.load import http_request

PATIENCE = 60.0
BENCH_PYTHON = Path(os.environ.get("BENCH_PYTHON", ROOT / ".venv-bench/bin/python"))
"""The environment of contestants that need httptools, which must not be installed beside our server."""


@dataclass(frozen=True)
class Contestant:
    name: str
    start: Callable[[Path, Path], AbstractContextManager[Server]]
    request: Callable[[bytes], bytes]
    python: Path = Path(sys.executable)

    @property
    def installed(self) -> bool:
        return self.python.exists()


def _ours(home: Path, bundle: Path) -> AbstractContextManager[Server]:
    return serving(home, bundle, settings={"OPENWORLD_WORKERS": "1", "OPENWORLD_THREADS": "1"})


def _fastapi(home: Path, bundle: Path, python: Path = Path(sys.executable)) -> AbstractContextManager[Server]:
    """With the parser that is installed: h11 beside our server, httptools in the environment of the benchmarks."""
    quiet = ["--loop", "uvloop", "--no-access-log", "--log-level", "warning"]
    app = ["--factory", "tests.benchmarks.bare_fastapi:make_app"]
    return _running(
        home, bundle, lambda port: ["uvicorn", *app, "--host", "127.0.0.1", "--port", str(port), *quiet], python
    )


def _bentoml(home: Path, bundle: Path) -> AbstractContextManager[Server]:
    target = "tests.benchmarks.bare_bentoml:Stock"
    return _running(home, bundle, lambda port: ["bentoml", "serve", target, "--host", "127.0.0.1", "--port", str(port)])


def _litserve(home: Path, bundle: Path) -> AbstractContextManager[Server]:
    return _running(home, bundle, lambda port: ["tests.benchmarks.bare_litserve", str(port)], BENCH_PYTHON)


def _raw(image: bytes) -> bytes:
    return http_request("/predict", image)


def _form(image: bytes) -> bytes:
    request = httpx.Request("POST", "http://x/predict", files={"image": ("image.png", image, "image/png")})
    return http_request("/predict", request.read(), request.headers["content-type"])


def _json(image: bytes) -> bytes:
    return http_request(
        "/predict", json.dumps({"image": base64.b64encode(image).decode()}).encode(), "application/json"
    )


FASTAPI = "bare FastAPI"
OURS = "openworld"
CONTESTANTS = (
    Contestant(FASTAPI, _fastapi, _raw),
    Contestant(OURS, _ours, _raw),
    Contestant("stock BentoML", _bentoml, _form),
    Contestant("bare FastAPI, httptools", partial(_fastapi, python=BENCH_PYTHON), _raw, BENCH_PYTHON),
    # It accepts no raw body.
    Contestant("LitServe", _litserve, _json, BENCH_PYTHON),
)


@contextlib.contextmanager
def _running(
    home: Path, bundle: Path, module: Callable[[int], list[str]], python: Path = Path(sys.executable)
) -> Iterator[Server]:
    """Run a server until the block ends, then stop it and all its processes."""
    port = free_port()
    home.mkdir(parents=True, exist_ok=True)
    log = home / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(python), "-m", *module(port)],
            cwd=ROOT,
            env={**os.environ, "BENCH_BUNDLE": str(bundle), "BENTOML_HOME": str(home), "BENTOML_DO_NOT_TRACK": "True"},
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
