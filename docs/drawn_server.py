"""What the scripts that make pictures share: a server of drawn photos, which can be taught, and a browser.

    with drawn_server(folder, port) as server, browser() as chromium: ...

It needs the extras `train`, `photos`, `client` and `dev`, and Chromium.
"""

from __future__ import annotations

import io
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from export.demo.pictures import photo, write_photos
from export.demo.teach import KNOWN
from export.exporter import export
from openworld import fit
from serving import demo
from serving.bundle.shelf import Shelf
from serving.client import Client

RUN_IMAGES = 16
PATIENCE = 240.0
USER = "ada"


@dataclass(frozen=True)
class Drawn:
    """A server that is ready, and where its run is."""

    url: str
    token: str
    run: Path


@contextmanager
def drawn_server(folder: Path, port: int, **settings: str) -> Iterator[Drawn]:
    """Learn the drawn classes as two tasks, which takes a minute, and serve them from a shelf in `folder`."""
    photos = write_photos(folder / "photos", **dict.fromkeys(KNOWN, RUN_IMAGES))
    fit(folder / "run", data=photos, tasks=[KNOWN[:3], KNOWN[3:]], quick=True, quiet=True)
    shelf = folder / "shelf"
    shelf.mkdir()
    # With so few photos the verdict may be weak; what is shown is how a server works.
    export(folder / "run", shelf, shelf=Shelf(shelf), force=True)
    drawn = Drawn(f"http://127.0.0.1:{port}", secrets.token_urlsafe(24), folder / "run")
    server = demo.start(
        folder / "bentoml",
        port,
        {
            "OPENWORLD_BUNDLES": str(shelf),
            "OPENWORLD_QUARANTINE_URL": f"sqlite:///{folder / 'quarantine.db'}",
            "OPENWORLD_ADMIN_TOKEN": drawn.token,
            "OPENWORLD_ACCESS_LOG": "off",
            "OPENWORLD_WORKERS": "1",
        }
        | settings,
    )
    try:
        with Client(drawn.url, timeout=PATIENCE) as client:
            wait(client.ready)
        yield drawn
    finally:
        demo.stop(server)


@contextmanager
def browser() -> Iterator[Browser]:
    """Chromium of this system; nothing is downloaded."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        raise SystemExit("no Chromium; apt-get install chromium")
    with sync_playwright() as driver:
        # Chromium's own sandbox refuses to run as root.
        root = ["--no-sandbox"] if os.geteuid() == 0 else []
        opened = driver.chromium.launch(executable_path=path, args=root)
        yield opened
        opened.close()


def jpeg(label: str, number: int) -> bytes:
    """A drawn photo of a class as a file, the same each time, and large enough for a page to show it."""
    content = io.BytesIO()
    photo(label, number, scale=4).save(content, "JPEG", quality=92)
    return content.getvalue()


def wait(met: Callable[[], bool]) -> None:
    """Wait until something is true, on a machine that may be busy."""
    deadline = time.monotonic() + PATIENCE
    while not met():
        if time.monotonic() > deadline:
            raise SystemExit(f"not ready within {PATIENCE:g} seconds")
        time.sleep(0.2)
