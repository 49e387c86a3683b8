"""A hundred swaps under load, and a server that is killed with all its processes and started again, many times."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import numpy as np
import psutil

from serving.bundle.shelf import Shelf
from tests.conftest import ReportLine
from tests.e2e.test_swap import TOKEN, Known, Load, admin, assert_all_answered_by_what_they_name, megabytes, settled
from tests.helpers_quarantine import Place, noise
from tests.helpers_serving import (
    PATIENCE,
    Server,
    eventually,
    free_port,
    http_get,
    metric,
    saved,
    serve_command,
    server_environment,
    serving,
    wait_until_ready,
    write_bundle,
)
from tests.load import Figures
from tests.serving.quarantine.test_quarantine_server import settings

SWAPS = int(os.environ.get("OPENWORLD_SWAPS", "100"))
RESTARTS = int(os.environ.get("OPENWORLD_RESTARTS", "10"))


def test_a_hundred_swaps_fail_no_request(tmp_path: Path, report_line: ReportLine) -> None:
    """Half of them are asked for, and half are noticed by the workers, which watch the shelf."""
    known, shelf = Known(tmp_path / "bundles"), Shelf(tmp_path / "shelf")
    for version, folder in known.folders.items():
        shutil.copytree(folder, shelf.folder / version)
    shelf.point_at(known.versions[0])
    chosen = {"OPENWORLD_WORKERS": "2", "OPENWORLD_BUNDLES": str(shelf.folder), "OPENWORLD_ADMIN_TOKEN": TOKEN}
    held = []
    with serving(tmp_path / "home", None, settings=chosen) as server:
        eventually(lambda: settled(server, known.versions[0]))
        with Load(server) as load:
            for number in range(1, SWAPS + 1):
                version = known.versions[number % 3]
                shelf.point_at(version)
                if number % 2:
                    answer = admin(server, "POST", "/admin/reload")
                    assert answer.status_code == 200, answer.text
                    assert answer.json()["version"] == version
                eventually(lambda version=version: settled(server, version))
                held.append(max(megabytes(server)))
        counts = assert_all_answered_by_what_they_name(load.replies, known)
        assert metric(server, "openworld_swaps_total", outcome="switched") == SWAPS
        assert "Traceback" not in server.log.read_text()
    bundle = sum(file.stat().st_size for file in known.folders[known.versions[0]].iterdir()) / 1e6
    figures = Figures.of(load.replies)
    early, late = float(np.median(held[2:12])), float(np.median(held[-10:]))
    report_line(
        f"swaps: {SWAPS} of {bundle:.0f} MB under {figures.rate:.0f} requests/s: {sum(counts.values())} answers, none "
        f"failed, each by the version that it names; p99 {figures.p99:.0f} ms; "
        f"largest worker {early:.0f} MB after a few swaps, {late:.0f} MB at the end"
    )
    assert set(counts) == set(known.versions)
    # A bundle that is not freed after each swap would be seen a hundred times.
    assert late - early < 4 * bundle


class Customer(threading.Thread):
    """Sends unknown images, each once, and remembers those that were answered."""

    def __init__(self, port: int, first: int) -> None:
        super().__init__()
        self.port, self.number = port, first
        self.answered: set[str] = set()
        self.statuses = Counter[int]()
        self.refused = 0
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.is_set():
            with httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=PATIENCE) as client:
                self._ask(client)
            self.ended.wait(0.02)

    def _ask(self, client: httpx.Client) -> None:
        with contextlib.suppress(httpx.TransportError):
            while not self.ended.is_set():
                content = saved(noise(self.number))
                self.number += 1
                self.refused += 1
                status = client.post("/predict", content=content).status_code
                self.refused -= 1
                self.statuses[status] += 1
                if status == 200:
                    self.answered.add(hashlib.sha256(content).hexdigest())


def start(port: int, home: Path, bundle: Path, chosen: dict[str, str]) -> Server:
    """A server in a process group of its own, always on the same port, as a service manager starts it again."""
    log = home / "server.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            serve_command(port),
            env=server_environment(home, bundle, chosen),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Server(f"http://127.0.0.1:{port}", port, log, process)


def test_a_killed_supervisor_is_replaced_and_loses_no_durable_image(tmp_path: Path, report_line: ReportLine) -> None:
    """kill -9 of the parent process alone, under load: what its orphans hold must not stop the next server."""
    place = Place(f"sqlite:///{tmp_path}/quarantine.db", str(tmp_path / "images"))
    chosen = settings(place, workers=2, DURABLE="1", MAX_ITEMS="1000000") | {"OPENWORLD_ACCESS_LOG": "off"}
    bundle, home, port, randomly = write_bundle(tmp_path / "bundle"), tmp_path / "home", free_port(), random.Random(8)
    home.mkdir()
    customers = [Customer(port, 1_000_000 * each) for each in range(4)]
    orphans_left, waits = 0, []
    for customer in customers:
        customer.start()
    try:
        for _ in range(RESTARTS):
            began = time.monotonic()
            server = start(port, home, bundle, chosen)
            try:
                wait_until_ready(server)
                waits.append(time.monotonic() - began)
                workers = psutil.Process(server.process.pid).children(recursive=True)
                time.sleep(randomly.uniform(0, 1))
            finally:
                server.process.kill()
                server.process.wait()
            _, alive = psutil.wait_procs(workers, timeout=PATIENCE / 2)
            orphans_left += len(alive)
            for orphan in alive:
                orphan.kill()
        server = start(port, home, bundle, chosen)
        wait_until_ready(server)
        assert http_get(f"{server.url}/readyz").status_code == 200
    finally:
        for customer in customers:
            customer.ended.set()
        for customer in customers:
            customer.join()
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(PATIENCE)
    store = place.open()
    kept = {hashlib.sha256(store.image(item.id)).hexdigest() for item in store.items()}
    answered = set().union(*(customer.answered for customer in customers))
    statuses = sum((customer.statuses for customer in customers), Counter[int]())
    report_line(
        f"supervisor: {RESTARTS} kill -9 under load; {len(answered)} unknown images answered with "
        f"OPENWORLD_QUARANTINE_DURABLE=1, all stored; {sum(c.refused for c in customers)} requests broken by a kill; "
        f"statuses {dict(statuses)}; ready again after {np.median(waits):.1f} s (median), {orphans_left} workers left"
    )
    assert answered
    assert answered <= kept
    assert orphans_left == 0, "workers outlive their supervisor"
    assert set(statuses) <= {200, 503}
