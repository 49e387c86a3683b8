"""The clock of the machine jumps while a server runs: answers, deadlines, swaps and the quarantine go on.

libfaketime changes the wall clock of the server's processes through a file; the monotonic clock stays right, as when an
administrator or NTP sets the time.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import httpx
import pytest

from serving.bundle.shelf import Shelf
from tests.conftest import ReportLine
from tests.e2e.test_swap import Known
from tests.helpers_quarantine import Place, noise
from tests.helpers_serving import COLOURS, Server, eventually, http_get, image_bytes, metric, saved, serving
from tests.serving.quarantine.test_quarantine_server import settings

LIBRARY = next(iter(sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))), None)
JUMPS = ("-1d", "+2d", "-400d", "+0d")
TOKEN = "f00dfacef00dface-token"


@pytest.mark.skipif(LIBRARY is None, reason="libfaketime is not installed (Debian: apt-get install faketime)")
def test_a_clock_that_jumps_stops_nothing(tmp_path: Path, report_line: ReportLine) -> None:
    clock = tmp_path / "clock"
    clock.write_text("+0d\n")
    place = Place(f"sqlite:///{tmp_path}/quarantine.db", str(tmp_path / "images"))
    known = Known(tmp_path / "bundles")
    shelf = Shelf(tmp_path / "shelf")
    for version, folder in known.folders.items():
        shutil.copytree(folder, shelf.folder / version)
    shelf.point_at(known.versions[0])
    chosen = settings(place, workers=2) | {
        "OPENWORLD_BUNDLES": str(shelf.folder),
        "OPENWORLD_ADMIN_TOKEN": TOKEN,
        "LD_PRELOAD": str(LIBRARY),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_NO_CACHE": "1",
        "DONT_FAKE_MONOTONIC": "1",
    }
    sent, slowest = 0, 0.0
    with serving(tmp_path / "home", None, settings=chosen) as server:
        for number, jump in enumerate(JUMPS, start=1):
            clock.write_text(f"{jump}\n")
            for _ in range(20):
                sent += 1
                started = time.monotonic()
                answer = httpx.post(f"{server.url}/predict", content=saved(noise(sent)), timeout=30)
                slowest = max(slowest, time.monotonic() - started)
                assert answer.status_code == 200
            assert (
                httpx.post(f"{server.url}/predict", content=image_bytes(COLOURS["red"]), timeout=30).status_code == 200
            )
            # The workers watch the shelf by themselves.
            version = known.versions[number % len(known.versions)]
            shelf.point_at(version)
            eventually(lambda version=version: served(server) == version)
            eventually(lambda sent=sent: metric(server, "openworld_quarantine_kept_total") == sent)
        assert "Traceback" not in server.log.read_text()
    assert len(place.open().items()) > 0
    report_line(
        f"clock: jumps {', '.join(JUMPS)}; {sent} unknown images kept, {len(JUMPS)} swaps, slowest {slowest:.2f} s"
    )


def served(server: Server) -> str:
    return str(http_get(f"{server.url}/model").json()["version"])
