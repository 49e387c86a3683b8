"""kill -9 at random moments of teaching, under load: every acknowledged example and version is there.

A job, a worker or the whole server is killed while people add examples and teach. OPENWORLD_KILLS changes the number of
kills. The second campaign gives a hundred lessons, after which a worker has the memory that it had.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from serving.bundle.manifest import load_bundle
from serving.bundle.shelf import Shelf
from serving.client import Client, Retries, ServiceError
from serving.quarantine.store import Store
from tests.conftest import ReportLine
from tests.helpers_serving import Server, serving
from tests.helpers_teaching import STRANGERS, picture, write_bundle

KILLS = int(os.environ.get("OPENWORLD_KILLS", "50"))
LESSONS = int(os.environ.get("OPENWORLD_LESSONS", "100"))
LONGEST = float(os.environ.get("OPENWORLD_KILL_EVERY", "8"))
"""Seconds at most between two kills; a lesson takes one or two."""
TOKEN = "a-token-of-enough-length"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    bundle = write_bundle(tmp_path / "bundle")
    version = load_bundle(bundle).manifest.version
    shutil.copytree(bundle, tmp_path / "shelf" / version)
    Shelf(tmp_path / "shelf").point_at(version)
    return tmp_path


def settings_of(place: Path) -> dict[str, str]:
    return {
        "OPENWORLD_BUNDLES": str(place / "shelf"),
        "OPENWORLD_ADMIN_TOKEN": TOKEN,
        "OPENWORLD_QUARANTINE_URL": f"sqlite:///{place}/quarantine.db",
        "OPENWORLD_WORKERS": "2",
        "OPENWORLD_ACCESS_LOG": "off",
        "OMP_NUM_THREADS": "1",
    }


class Person(threading.Thread):
    """Adds examples and teaches them until the end; remembers what was acknowledged."""

    def __init__(self, url: list[str]) -> None:
        super().__init__(daemon=True)
        self.url, self.end = url, threading.Event()
        self.examples: dict[int, str] = {}
        self.versions: list[str] = []
        self.answers = self.number = self.alone = 0

    def run(self) -> None:
        while not self.end.is_set():
            with contextlib.suppress(ServiceError, httpx.HTTPError, TimeoutError):
                self.teach()

    def teach(self) -> None:
        with Client(self.url[0], timeout=60, retries=Retries(attempts=1)) as client:
            teaching = client.teaching(TOKEN, "soak")
            label = STRANGERS[self.number % len(STRANGERS)]
            for _ in range(4):
                self.number += 1
                added = teaching.add(label, picture(label, self.number))
                self.examples[added.id] = label
            client.predict(picture("ant", self.number))
            self.answers += 1
            # Every second lesson is published by the server, whose worker may be killed meanwhile.
            alone = self.number // 4 % 2 == 0
            job = teaching.wait(teaching.learn(accept=alone), timeout=60)
            if job.state == "accepted" and job.candidate is not None:
                self.versions.append(job.candidate)
                self.alone += 1
            elif job.state == "done":
                self.versions.append(teaching.accept(job.id).version)


def jobs_of(place: Path) -> list[int]:
    """Ids of the processes of jobs."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            command, environment = ((entry / name).read_bytes() for name in ("cmdline", "environ"))
            if b"serving.teaching.work" in command and str(place).encode() in environment:
                found.append(int(entry.name))
    return found


def workers_of(server: Server) -> list[int]:
    with contextlib.suppress(httpx.HTTPError, KeyError):
        headers = {"authorization": f"Bearer {TOKEN}"}
        found = httpx.get(f"{server.url}/admin/status", headers=headers, timeout=20).json()
        return [worker["pid"] for worker in found["workers"]]
    return []


@contextlib.contextmanager
def running(place: Path, person_url: list[str]) -> Iterator[Server]:
    with serving(place / "home", None, settings=settings_of(place)) as server:
        person_url[0] = server.url
        yield server


def test_kills_while_teaching(place: Path, report_line: ReportLine) -> None:
    noise, kills, url = random.Random(1), {"job": 0, "worker": 0, "server": 0}, ["http://127.0.0.1:1"]
    person = Person(url)
    person.start()
    while sum(kills.values()) < KILLS:
        with running(place, url) as server:
            for _ in range(8):
                time.sleep(noise.uniform(0.2, LONGEST))
                what = noise.choice(["job", "job", "worker"])
                if found := jobs_of(place) if what == "job" else workers_of(server):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(noise.choice(found), signal.SIGKILL)
                        kills[what] += 1
            for pid in [*workers_of(server), server.process.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            kills["server"] += 1
    person.end.set()
    person.join(60)
    check(place, person)
    assert min(kills.values()) > 0, kills
    assert 0 < person.alone < len(person.versions)
    report_line(
        f"teaching: {sum(kills.values())} kill -9 ({kills}), {len(person.examples)} examples and "
        f"{len(person.versions)} versions ({person.alone} published by the server) acknowledged, all there"
    )


def check(place: Path, person: Person) -> None:
    store = Store.open(f"sqlite:///{place}/quarantine.db")
    stored = {each.id: each.label for each in store.examples()}
    store.close()
    assert person.examples.items() <= stored.items()
    assert person.versions
    shelf = Shelf(place / "shelf")
    current = shelf.current()
    assert current is not None
    for folder in (place / "shelf").iterdir():
        if not folder.is_symlink() and not folder.name.startswith("."):
            load_bundle(folder).check()
    kept = {folder.name for folder in (place / "shelf").iterdir()}
    # The oldest versions are removed when there are very many.
    assert set(person.versions[-40:]) <= kept
    with serving(place / "last", None, settings=settings_of(place)) as server:
        version = httpx.get(f"{server.url}/model").json()["version"]
        assert version == current.name


def resident(pid: int) -> int:
    """Kilobytes of memory."""
    found = re.search(r"VmRSS:\s+([0-9]+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1])


def test_memory_after_many_lessons(place: Path, report_line: ReportLine) -> None:
    url = [""]
    with running(place, url) as server, Client(server.url, timeout=60) as client:
        teaching = client.teaching(TOKEN, "soak")
        sizes: list[int] = []
        for lesson in range(LESSONS):
            label = STRANGERS[lesson % len(STRANGERS)]
            for number in range(2):
                teaching.add(label, picture(label, 2 * lesson + number))
            job = teaching.wait(teaching.learn(accept=True))
            assert job.state == "accepted", job
            if lesson % 10 == 9:
                sizes.append(max(map(resident, workers_of(server))))
    # The first lessons load what teaching needs.
    grown = sizes[-1] / sizes[1]
    over_time = ", ".join(f"{size // 1024}" for size in sizes)
    report_line(f"teaching: {LESSONS} lessons, MB of the largest worker after every tenth: {over_time}")
    assert grown < 1.1, sizes
