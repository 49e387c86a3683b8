"""How long a server of the digits takes from its command until /readyz succeeds."""

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
from tests.helpers_bento import build_bento, entry_script
from tests.helpers_serving import ROOT, SOURCE, free_port, serve_command, server_environment

STARTS = int(os.environ.get("BENCH_STARTS", "10"))
PATIENCE = 60.0
ENVIRONMENTS = {
    "full": Path(sys.executable),
    "serving only": Path(os.environ.get("BENCH_SERVING_PYTHON", ROOT / ".venv-serving/bin/python")),
}


COMMANDS = {"python -m serving": None, "bentoml serve": SOURCE, "entry point of the bento": None}
ENTRY_POINT = ["serve", "--timeout-graceful-shutdown", "32"]


@pytest.fixture(scope="module")
def bento(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the same network as the bundle of the other commands."""
    return build_bento(tmp_path_factory.mktemp("bento"), tmp_path_factory.mktemp("project"), digits_bundle)


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_seconds_to_ready(name: str, bento: Path, report: Report, tmp_path: Path) -> None:
    """All commands take turns, so that other work on the machine affects all of them."""
    python = ENVIRONMENTS[name]
    if not python.exists():
        pytest.skip(f"no {python}; `make test` makes it")
    bundle = digits_bundle(tmp_path / "bundle")
    seconds: dict[str, list[float]] = {command: [] for command in COMMANDS}
    for number in range(STARTS):
        for command, target in COMMANDS.items():
            home = tmp_path / f"home-{number}-{command.split()[0]}"
            home.mkdir()
            if command.startswith("entry"):
                # An image is used read-only: what Python compiles at a start is not there at the next one.
                kept = "PYTHONDONTWRITEBYTECODE=1"
                script = entry_script(bento, ENTRY_POINT, home, python=python, variables=kept)
                seconds[command].append(seconds_to_ready(script, target, None, home, folder=home))
            else:
                seconds[command].append(seconds_to_ready(python, target, bundle, home))
            print(f"{name}, {command}: ready after {seconds[command][-1]:.2f} s", flush=True)
    rows = []
    usual = float(np.median(seconds["bentoml serve"]))
    for command, measured in seconds.items():
        quartiles = np.percentile(measured, [0, 25, 50, 75, 100])
        report.add(f"start of the digits, {name}, {command}, median", float(quartiles[2]), "s", usual)
        report.add(f"start of the digits, {name}, {command}, slowest", float(quartiles[4]), "s")
        shown = [f"{value:.2f}" for value in (*quartiles, quartiles[2] / usual)]
        rows.append((name, command, str(STARTS), *shown))
    head = (
        "environment",
        "command",
        "starts",
        "fastest s",
        "25 %",
        "median",
        "75 %",
        "slowest",
        "against bentoml serve",
    )
    print(f"\n\n{table(head, rows)}")


def seconds_to_ready(
    python: Path, target: str | None, bundle: Path | None, home: Path, *, folder: Path = ROOT
) -> float:
    port = free_port()
    with (home / "server.log").open("wb") as log:
        started = time.perf_counter()
        process = subprocess.Popen(
            serve_command(port, str(python), target),
            cwd=folder,
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
