from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.e2e.default import Line, learn_default

if TYPE_CHECKING:
    from playwright.sync_api import Browser

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = (
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
CAMERA = ("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream")


@pytest.fixture(scope="session")
def line(tmp_path_factory: pytest.TempPathFactory) -> Line:
    """The default, which the first test process that needs it learns for all; a test that changes it copies it."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with (shared / "default.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return learn_default(shared / "default")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Debian's Chromium (`apt-get install chromium`); nothing is downloaded."""
    if CHROMIUM is None:
        pytest.skip("no Chromium; apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright; pip install -e '.[dev]'")
    # Chromium's own sandbox refuses to run as root, which a container's test usually is.
    root = ["--no-sandbox"] if os.geteuid() == 0 else []
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=[*QUIET, *CAMERA, *root])
        yield started
        started.close()
