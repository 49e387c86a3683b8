"""As many requests as a day brings, as fast as they are answered: memory, files and disk stay flat."""

from __future__ import annotations

import itertools
import os
import random
from collections import Counter
from pathlib import Path

import psutil

from tests.conftest import ReportLine
from tests.helpers_quarantine import Place, noise
from tests.helpers_serving import COLOURS, Server, image_bytes, saved, serving, write_bundle
from tests.load import http_request, send, workers
from tests.serving.quarantine.test_quarantine_server import settings

REQUESTS = int(os.environ.get("OPENWORLD_DAY", "86400"))
"""One per second for a day."""
STEPS = 12
KEPT = 200
"""The limit of the quarantine: after the first step, old images make room for new ones."""


def used(server: Server, folder: Path) -> tuple[float, int, float]:
    """Megabytes of all workers, their open files, and megabytes on disk."""
    processes = workers(server, 2)
    memory = sum(each.memory_info().rss for each in processes) / 1e6
    files = sum(each.num_fds() for each in processes)
    disk = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6
    return memory, files, disk


def requests(step: int, count: int) -> list[bytes]:
    randomly = random.Random(step)
    known = [image_bytes(colour) for colour in COLOURS.values()]
    odd = [b"no image", known[0][:-20], b""]
    made = []
    for number in range(count):
        kind = randomly.random()
        content = saved(noise(step * count + number)) if kind < 0.1 else randomly.choice(odd if kind < 0.12 else known)
        made.append(http_request("/predict", content))
    return made


def test_a_day_of_requests_leaves_nothing_behind(tmp_path: Path, report_line: ReportLine) -> None:
    place = Place(f"sqlite:///{tmp_path}/quarantine/items.db", str(tmp_path / "quarantine/images"))
    (tmp_path / "quarantine").mkdir()
    chosen = settings(place, workers=2, MAX_ITEMS=str(KEPT)) | {"OPENWORLD_ACCESS_LOG": "off"}
    figures, statuses, answered = [], Counter[int](), 0
    with serving(tmp_path / "home", write_bundle(tmp_path / "bundle"), settings=chosen) as server:
        before = {each.pid for each in workers(server, 2)}
        for step in range(STEPS):
            for reply in send(server.port, requests(step, REQUESTS // STEPS), clients=8):
                statuses[reply.status] += 1
                answered += 1
            figures.append(used(server, tmp_path))
        assert {each.pid for each in workers(server, 2)} == before, "a worker died"
        assert psutil.Process(server.process.pid).num_threads() < 64
    assert not [status for status in statuses if status >= 500 and status != 503]
    # The first sixth warms up: pools of memory, the limit of the quarantine, the database's file.
    warm = figures[STEPS // 6]
    for now, then, room, name in zip(figures[-1], warm, (40, 8, 8), ("memory", "files", "disk"), strict=True):
        assert now - then < room, f"{name}: {then:.0f} -> {now:.0f}; allowed: {room} more"
    steps = ", ".join(f"{memory:.0f}" for memory, _, _ in itertools.islice(figures, 0, None, 2))
    report_line(
        f"a day: {answered} requests {dict(sorted(statuses.items()))}; memory of both workers in MB {steps}; "
        f"open files {warm[1]} -> {figures[-1][1]}; disk {warm[2]:.1f} -> {figures[-1][2]:.1f} MB"
    )
