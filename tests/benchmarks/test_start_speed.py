"""How long a server of the digits takes from its command to its first answer that it is ready."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.benchmarks.conftest import Report, table
from tests.benchmarks.graphs import digits_bundle
from tests.helpers_serving import ROOT, free_port, serve_command, server_environment

STARTS = 10
PATIENCE = 60.0
ENVIRONMENTS = {
    "full": Path(sys.executable),
    "serving only": Path(os.environ.get("BENCH_SERVING_PYTHON", ROOT / ".venv-serving/bin/python")),
}


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_seconds_to_ready(name: str, report: Report, tmp_path: Path) -> None:
    python = ENVIRONMENTS[name]
    if not python.exists():
        pytest.skip(f"no {python}; `make test` makes it")
    bundle = digits_bundle(tmp_path / "bundle")
    seconds = []
    for number in range(STARTS):
        seconds.append(seconds_to_ready(python, bundle, tmp_path / f"home{number}"))
        print(f"{name}: ready after {seconds[-1]:.2f} s", flush=True)
    quartiles = np.percentile(seconds, [0, 25, 50, 75, 100])
    report.add(f"start of the digits, {name}, median", float(quartiles[2]), "s")
    report.add(f"start of the digits, {name}, slowest", float(quartiles[4]), "s")
    head = ("environment", "starts", "fastest s", "25 %", "median", "75 %", "slowest")
    print(f"\n\n{table(head, [(name, str(STARTS), *(f'{value:.2f}' for value in quartiles))])}")


def seconds_to_ready(python: Path, bundle: Path, home: Path) -> float:
    home.mkdir()
    port = free_port()
    with (home / "server.log").open("wb") as log:
        started = time.perf_counter()
        process = subprocess.Popen(
            serve_command("serving.service:OpenWorld", port, str(python)),
            cwd=ROOT,
            env=server_environment(home, bundle),
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        while not ready(port):
            assert process.poll() is None, (home / "server.log").read_text()
            assert time.perf_counter() - started < PATIENCE
            time.sleep(0.01)
        return time.perf_counter() - started
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=PATIENCE)


def ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
