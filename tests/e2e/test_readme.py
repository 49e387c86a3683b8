"""Runs the commands in README.md: every line of its `sh` blocks, in order, as a reader would after `make demo`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image

from tests.e2e.default import Line
from tests.helpers_serving import PATIENCE, ROOT, free_port, http_get, http_post

pytestmark = pytest.mark.long

DEMO_PORT = "3000"
START_SECONDS = PATIENCE


def readme_commands() -> list[str]:
    blocks = re.findall(r"^```sh\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line and not line.startswith("#")]


@dataclass(frozen=True)
class Demo:
    """A directory that looks like a checkout after `make demo`, the port of its server, and what it printed."""

    checkout: Path
    port: int
    printed: str


@pytest.fixture(scope="module")
def demo(line: Line, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    checkout, port = tmp_path_factory.mktemp("checkout"), free_port()
    (checkout / "runs").mkdir()
    (checkout / "runs/demo").symlink_to(line.folder)
    (checkout / ".venv").symlink_to(sys.prefix)
    write_photos(checkout / "FOLDER")
    with subprocess.Popen(
        [sys.executable, "-m", "serving.demo", "runs/demo", "--port", str(port)],
        cwd=checkout,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "BENTOML_HOME": str(checkout / "home")},
        # Background processes of a shell without job control ignore Ctrl-C, and so do their children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as server:
        assert server.stdout is not None
        printed = ""
        while "Ctrl-C" not in printed:
            text = server.stdout.readline()
            assert text, printed
            printed += text
        # Read on, so that the server is never stopped by a full pipe.
        threading.Thread(target=server.stdout.read, daemon=True).start()
        yield Demo(checkout, port, printed)
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=PATIENCE) == 0


def write_photos(folder: Path) -> None:
    """Four classes of images of one colour each with some noise: own images that are quick to learn."""
    noise = np.random.default_rng(0)
    for number, label in enumerate(("red", "green", "blue", "grey")):
        (folder / label).mkdir(parents=True)
        for image in range(12):
            pixels = noise.integers(0, 80, (64, 64, 3), dtype=np.uint8)
            pixels[:, :, number % 3 if number < 3 else slice(None)] += 150
            Image.fromarray(pixels).save(folder / label / f"{image}.png")


def test_demo_prints_requests_to_try(demo: Demo) -> None:
    """The lines that `make demo` prints, pasted into a shell."""
    commands = re.findall(r"^  (curl .*)$", demo.printed, re.MULTILINE)
    answers = [json.loads(subprocess.check_output(command, shell=True)) for command in commands]
    assert [answer["known"] for answer in answers] == [True, False]
    assert answers[1]["label"] == "unknown"


def test_the_commands_in_readme_work(demo: Demo, tmp_path: Path) -> None:
    checkout = demo.checkout
    commands = readme_commands()
    assert any(command.startswith("curl") for command in commands)
    assert any(command.startswith("openworld fit --data") for command in commands)
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.prefix) / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "BENTOML_HOME": str(tmp_path),
        "XDG_CACHE_HOME": str(tmp_path),
    }
    for command in commands:
        if command.startswith("openworld serve"):
            assert_serves(command, checkout, environment)
            continue
        command = command.replace(f":{DEMO_PORT}/", f":{demo.port}/")
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=checkout,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        if command.startswith("curl"):
            assert "error" not in json.loads(done.stdout), command


def assert_serves(command: str, checkout: Path, environment: dict[str, str]) -> None:
    """The command starts a server that answers, and the server ends when it is asked to."""
    port = free_port()
    assert f"--port {DEMO_PORT}" in command
    command = command.partition("#")[0].replace(f"--port {DEMO_PORT}", f"--host 127.0.0.1 --port {port}")
    started = subprocess.Popen(["bash", "-c", f"exec {command}"], cwd=checkout, env=environment)
    try:
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until and started.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                if http_get(f"http://127.0.0.1:{port}/readyz").status_code == 200:
                    break
            time.sleep(0.1)
        image = next((checkout / "FOLDER/red").iterdir()).read_bytes()
        answer = http_post(f"http://127.0.0.1:{port}/predict", content=image, headers={"content-type": "image/png"})
        assert answer.json()["best_guess"] in {"red", "green", "blue", "grey"}
    finally:
        started.send_signal(signal.SIGTERM)
        started.wait(PATIENCE)
    assert started.returncode == 0
