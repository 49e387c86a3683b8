"""kill -9 at random moments of teaching, under load: every acknowledged example and version is there.

A job, a worker or the whole server is killed while two people add examples and teach, and others send images to be
answered. OPENWORLD_KILLS changes the number of kills. The second campaign gives a hundred lessons that extend classes,
after which a worker has the memory that it had; the third gives OPENWORLD_NEW_CLASSES lessons of a new class each, and
measures what a worker needs for each.
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
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from serving.bundle.manifest import load_bundle
from serving.bundle.shelf import Shelf
from serving.client import Client, Retries, ServiceError
from serving.quarantine.store import Store
from tests.conftest import ReportLine
from tests.helpers_serving import Server, serving
from tests.helpers_teaching import ALL, DIM, STRANGERS, drawn, picture, write_bundle

NEW_CLASSES = int(os.environ.get("OPENWORLD_NEW_CLASSES", "100"))
KILLS = int(os.environ.get("OPENWORLD_KILLS", "50"))
LESSONS = int(os.environ.get("OPENWORLD_LESSONS", "100"))
LONGEST = float(os.environ.get("OPENWORLD_KILL_EVERY", "8"))
"""Seconds at most between two kills; a lesson takes one or two."""
RATE = 5.0
"""Requests per second beside the two people; each unknown image is stored as well."""
MOST_PER_LESSON = 500.0
"""Kilobytes by which a lesson with a new class may enlarge a worker beside its detector."""
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

    def __init__(self, url: list[str], name: str, labels: Sequence[str], first: int = 0) -> None:
        super().__init__(daemon=True)
        self.url, self.end = url, threading.Event()
        self.who, self.labels, self.first = name, labels, first
        self.examples: dict[int, str] = {}
        self.versions: list[str] = []
        self.answers = self.number = self.alone = 0

    def run(self) -> None:
        while not self.end.is_set():
            with contextlib.suppress(ServiceError, httpx.HTTPError, TimeoutError):
                self.teach()
                continue
            # The server is gone, or it is the other person's turn.
            self.end.wait(0.3)

    def teach(self) -> None:
        with Client(self.url[0], timeout=60, retries=Retries(attempts=1)) as client:
            teaching = client.teaching(TOKEN, self.who)
            label = self.labels[self.number // 8 % len(self.labels)]
            for _ in range(4):
                self.number += 1
                added = teaching.add(label, picture(label, self.first + self.number))
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


class Traffic(threading.Thread):
    """Sends images to be answered, one after the other, RATE per second at most; a killed server answers none."""

    def __init__(self, url: list[str]) -> None:
        super().__init__(daemon=True)
        self.url, self.end = url, threading.Event()
        self.answered = self.failed = 0

    def run(self) -> None:
        number = 0
        while not self.end.is_set():
            try:
                with Client(self.url[0], timeout=20, retries=Retries(attempts=1)) as client:
                    url = self.url[0]
                    while self.url[0] == url and not self.end.wait(1 / RATE):
                        number += 1
                        client.predict(picture(ALL[number % len(ALL)], 10_000 + number % 500))
                        self.answered += 1
            except (ServiceError, httpx.HTTPError):
                self.failed += 1
                self.end.wait(0.5)


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
    # Two classes each, and pictures that the other one never sends: what is acknowledged to one is nobody else's.
    people = [Person(url, "ada", STRANGERS[:2]), Person(url, "bob", STRANGERS[2:], first=100_000)]
    traffic = Traffic(url)
    for thread in (*people, traffic):
        thread.start()
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
    for thread in (*people, traffic):
        thread.end.set()
        thread.join(60)
    for person in people:
        check(place, person)
    alone, versions = sum(person.alone for person in people), sum(len(person.versions) for person in people)
    assert min(kills.values()) > 0, kills
    assert 0 < alone < versions
    assert traffic.answered > traffic.failed
    report_line(
        f"teaching: {sum(kills.values())} kill -9 ({kills}), {sum(len(person.examples) for person in people)} examples "
        f"and {versions} versions ({alone} published by the server) of two people acknowledged, all there; meanwhile "
        f"{traffic.answered} images answered and {traffic.failed} requests failed"
    )


def check(place: Path, person: Person) -> None:
    store = Store.open(f"sqlite:///{place}/quarantine.db")
    stored = {each.id: each.label for each in store.examples()}
    store.close()
    assert person.examples
    assert person.examples.items() <= stored.items()
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


def test_what_a_worker_needs_for_each_new_class(place: Path, report_line: ReportLine) -> None:
    """Each is a task with a detector that stays, so memory grows; by little more than the detectors need."""
    url = [""]
    with running(place, url) as server, Client(server.url, timeout=60) as client:
        teaching = client.teaching(TOKEN, "soak")
        sizes: list[int] = []
        for lesson in range(NEW_CLASSES):
            for number in range(4):
                teaching.add(f"class {lesson}", drawn(100 + lesson, number))
            # So many classes of random patterns take images from each other; how much is not the question here.
            job = teaching.wait(teaching.learn(accept=True, force=True))
            assert job.state == "accepted", job
            sizes.append(max(map(resident, workers_of(server))))
        known = [entry.label for entry in teaching.classes(0).classes if entry.in_model]
    assert len(known) == len(ALL) - len(STRANGERS) + NEW_CLASSES
    # The first lessons load what teaching needs.
    first = min(len(sizes) // 5, 10)
    each = (sizes[-1] - sizes[first]) / (len(sizes) - 1 - first)
    detector = 4 * DIM * (len(ALL) + NEW_CLASSES) / 1024
    over_time = ", ".join(f"{size // 1024}" for size in sizes[:: max(1, len(sizes) // 10)])
    report_line(
        f"teaching: {NEW_CLASSES} lessons of a new class each, MB of the largest worker: {over_time}; "
        f"{each:.0f} kB per lesson, of which at most {detector:.0f} are its detector"
    )
    # A few lessons show the start of a worker and nothing else.
    assert NEW_CLASSES < 20 or each < detector + MOST_PER_LESSON, sizes
