"""PostgreSQL dies and comes back, again and again, under load and while images are labelled."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.conftest import ReportLine
from tests.helpers_quarantine import Place, Postgres, noise, postgres, postgres_binaries
from tests.helpers_serving import PATIENCE, Server, eventually, metric, saved, serving, write_bundle
from tests.serving.quarantine.test_quarantine_server import settings

RESTARTS = int(os.environ.get("OPENWORLD_RESTARTS", "10"))
TOKEN = "f00dfacef00dface-token"


@pytest.fixture
def database() -> Iterator[Postgres]:
    binaries = postgres_binaries()
    if binaries is None:
        pytest.skip("no PostgreSQL server is installed (Debian: apt-get install postgresql)")
    with postgres(binaries) as server:
        yield server


class Labelling(threading.Thread):
    """Names images one by one, and records which names were acknowledged."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self.server, self.acknowledged, self.statuses = server, dict[int, str](), Counter[int]()
        self.ended = threading.Event()

    def run(self) -> None:
        headers = {"authorization": f"Bearer {TOKEN}"}
        with httpx.Client(base_url=self.server.url, headers=headers, timeout=PATIENCE) as client:
            number = last = 0
            while not self.ended.wait(0.02):
                listed = client.get("/unknowns/items", params={"group": "none", "limit": 5, "after": last})
                self.statuses[listed.status_code] += 1
                if listed.status_code != 200:
                    continue
                for item in listed.json()["items"]:
                    number, last = number + 1, item["id"]
                    label = f"name {number}"
                    answer = client.post("/unknowns/label", json={"ids": [item["id"]], "label": label})
                    self.statuses[answer.status_code] += 1
                    if answer.status_code == 200:
                        self.acknowledged[item["id"]] = label
                    else:
                        # The change may have been made before its acknowledgement was lost.
                        self.acknowledged.pop(item["id"], None)


def test_a_database_that_dies_loses_no_label_and_no_answer(
    database: Postgres, tmp_path: Path, report_line: ReportLine
) -> None:
    place = Place(database.new_database(), str(tmp_path / "images"), database)
    chosen = {**settings(place, workers=2), "OPENWORLD_ADMIN_TOKEN": TOKEN}
    randomly, number, answers = random.Random(6), 0, Counter[int]()
    with serving(tmp_path / "home", write_bundle(tmp_path / "bundle"), settings=chosen) as server:
        labelling = Labelling(server)
        labelling.start()
        with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:

            def ask_for(seconds: float) -> None:
                nonlocal number
                until = time.monotonic() + seconds
                while time.monotonic() < until:
                    number += 1
                    answers[client.post("/predict", content=saved(noise(number))).status_code] += 1

            for _ in range(RESTARTS):
                ask_for(randomly.uniform(0.5, 2))
                database.stop()
                ask_for(randomly.uniform(0.2, 2))
                database.start()
            ask_for(1)
        names = [f"openworld_quarantine_{name}_total" for name in ("offered", "kept", "copies", "dropped")]
        eventually(lambda: metric(server, names[0]) == sum(metric(server, name) for name in names[1:]))
        labelling.ended.set()
        labelling.join()
        offered, kept, _, dropped = (metric(server, name) for name in names)
    assert set(answers) == {200}, "a prediction failed because of the database"
    assert set(labelling.statuses) <= {200, 503}, labelling.statuses
    assert offered == number
    store = place.open()
    stored = {item.id: item.label for item in store.items()}
    assert labelling.acknowledged
    assert {id: stored.get(id) for id in labelling.acknowledged} == labelling.acknowledged
    assert len(stored) >= kept
    report_line(
        f"PostgreSQL: {RESTARTS} times killed and restarted; {number} predictions, all answered; {kept:.0f} unknown "
        f"images kept, {dropped:.0f} dropped and counted; all {len(labelling.acknowledged)} acknowledged labels there; "
        f"requests for labels: {dict(labelling.statuses)}"
    )
