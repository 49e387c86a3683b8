"""What killed workers lose, and that it can be counted."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import httpx

from tests.conftest import ReportLine
from tests.helpers_quarantine import Place, noise
from tests.helpers_serving import Server, eventually, metric, saved, serving, write_bundle
from tests.load import workers
from tests.serving.quarantine.test_quarantine_server import ask, kept, settings


def test_what_a_killed_worker_loses_can_be_counted(tmp_path: Path, report_line: ReportLine) -> None:
    place = Place(f"sqlite:///{tmp_path}/quarantine.db", str(tmp_path / "images"))
    names = [f"openworld_quarantine_{name}_total" for name in ("offered", "kept", "copies", "dropped")]
    with serving(tmp_path / "home", write_bundle(tmp_path / "bundle"), settings=settings(place, workers=1)) as server:
        ask(server, saved(noise(0)))
        eventually(lambda: kept(server, 1))
        with closing(sqlite3.connect(tmp_path / "quarantine.db", isolation_level=None)) as other:
            other.execute("BEGIN EXCLUSIVE")
            for number in range(1, 6):
                ask(server, saved(noise(number)))
            eventually(lambda: metric(server, names[0]) == 6)
            (worker,) = workers(server, 1)
            worker.kill()
            worker.wait()
        ask_again = saved(noise(6))
        eventually(lambda: _answers(server))
        ask(server, ask_again)
        eventually(lambda: kept(server, 2))
        offered, *accounted = (metric(server, name) for name in names)
        lost = offered - sum(accounted)
        report_line(f"losses: of {offered:.0f} unknown images a killed worker lost 5, and the metrics say {lost:.0f}")
        assert lost == 5


def _answers(server: Server) -> bool:
    try:
        return httpx.get(f"{server.url}/readyz", timeout=5).status_code == 200
    except httpx.TransportError:
        return False
