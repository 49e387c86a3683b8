"""`make demo` and `make demo-loop` of the Makefile, in a copy of the checkout with the default already learned."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from export.demo.result import ENOUGH_REQUESTS
from serving.demo import taken
from tests.e2e.default import Line
from tests.helpers_checkout import copy_checkout
from tests.helpers_serving import PATIENCE, eventually, free_port, http_get, http_post

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def checkout(line: Line, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the environment of the tests; copies keep their times, by which make decides what there is to do."""
    place = copy_checkout(tmp_path_factory.mktemp("make") / "openworld")
    (place / ".venv").symlink_to(sys.prefix)
    shutil.copytree(line.folder, place / "runs/demo", symlinks=True)
    return place


def make(checkout: Path, target: str, port: int, log: Path) -> subprocess.Popen[bytes]:
    """Start make in a process group of its own, as a terminal does, without the installation."""
    # If the tests are run by make, its variables would be options of this make, too.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    with log.open("wb") as output:
        return subprocess.Popen(
            ["make", target, f"PORT={port}", "-o", ".venv/train"],
            cwd=checkout,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def answers(url: str) -> bool:
    try:
        return http_get(f"{url}/readyz").status_code == 200
    except httpx.TransportError:
        return False


def test_make_demo_serves_the_default_until_it_is_interrupted(checkout: Path, tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "log"
    process = make(checkout, "demo", port, log)
    try:
        eventually(lambda: answers(f"http://127.0.0.1:{port}") or process.poll() is not None)
        sample = (checkout / "runs/demo/samples/8.png").read_bytes()
        answer = http_post(f"http://127.0.0.1:{port}/predict", files={"image": sample}).json()
        assert answer["label"] == "unknown"
        eventually(lambda: "Ctrl-C stops the server" in log.read_text())
        # Ctrl-C in a terminal interrupts every process of the group.
        os.killpg(process.pid, signal.SIGINT)
        process.wait(PATIENCE)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(PATIENCE)
    printed = log.read_text()
    assert "Traceback" not in printed, printed
    # Nothing was installed or learned again.
    assert not re.search(r"installing|training\.fit|export\.samples", printed), printed
    assert not taken(port)


def test_make_demo_loop_ends_with_its_promises_kept(checkout: Path, tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "log"
    code = make(checkout, "demo-loop", port, log).wait(10 * PATIENCE)
    printed = log.read_text()
    promises = {text: met for met, text in re.findall(r"^(yes|NO) +(.+)$", printed, re.MULTILINE)}
    assert len(promises) > 5, printed
    # The rate depends on what else the processors do.
    broken = {text for text, met in promises.items() if met == "NO"}
    assert broken <= {ENOUGH_REQUESTS}, printed
    assert (code == 0) == (not broken), printed
    assert not taken(port)
