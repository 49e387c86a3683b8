"""How workers hold memory."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from serving.host import memory
from serving.host.memory import LARGE, WORK, MemoryWatch, request_large_pages
from tests.helpers_serving import ROOT, Server
from tests.load import workers


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, "glibc.malloc.hugetlb=1"),
        ("", "glibc.malloc.hugetlb=1"),
        ("glibc.malloc.check=1", "glibc.malloc.check=1:glibc.malloc.hugetlb=1"),
        ("glibc.malloc.hugetlb=0:glibc.malloc.check=1", "glibc.malloc.hugetlb=0:glibc.malloc.check=1"),
    ],
)
def test_large_pages_are_asked_for_unless_somebody_has_chosen(before: str | None, after: str) -> None:
    environment = {"OTHER": "1"} if before is None else {"OTHER": "1", "GLIBC_TUNABLES": before}
    request_large_pages(environment)
    assert environment == {"OTHER": "1", "GLIBC_TUNABLES": after}


def test_workers_request_large_pages(server: Server) -> None:
    (worker,) = workers(server, 1)
    assert worker.environ()["GLIBC_TUNABLES"].endswith("glibc.malloc.hugetlb=1")


# Each thread has 6 MB in blocks of 100 kB at a time, which are allocated by malloc, and frees them.
THREADS = """
import threading
import psutil
from serving.host.memory import limit_free_memory, return_memory

def fill():
    everyone.wait()
    blocks = [b"x" * 100_000 for _ in range(60)]
    everyone.wait()
    blocks.clear()
    everyone.wait()

limit_free_memory()
before = psutil.Process().memory_info().rss
everyone = threading.Barrier(12)
threads = [threading.Thread(target=fill) for _ in range(12)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
return_memory()
print(psutil.Process().memory_info().rss - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc has these settings")
def test_threads_keep_little_of_the_memory_that_they_have_freed() -> None:
    done = subprocess.run([sys.executable, "-c", THREADS], cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 20e6


# A body that arrives in small blocks beside others that stay: what is freed is between what is used.
HOLES = """
from serving.host.memory import MemoryWatch, limit_free_memory, resident

limit_free_memory()
watch = MemoryWatch()
before = resident()
blocks = [b"x" * 10_000 for _ in range(4000)]
kept = blocks[::100]
del blocks
print(resident() - before, watch.look(), watch.look(), resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc returns the memory in holes")
def test_the_memory_of_holes_is_returned_once() -> None:
    done = subprocess.run([sys.executable, "-c", HOLES], cwd=ROOT, capture_output=True, text=True, check=True)
    held, first, second, left = done.stdout.split()
    assert (first, second) == ("True", "False")
    assert int(held) > 30e6
    assert int(left) < LARGE


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What a MemoryWatch sees of its process, and how often it has returned memory."""
    process = SimpleNamespace(resident=100, worked=0.0, returned=0)

    def return_memory() -> None:
        process.returned += 1

    monkeypatch.setattr(memory, "return_memory", return_memory)
    monkeypatch.setattr(memory, "resident", lambda: process.resident)
    monkeypatch.setattr(memory, "time", SimpleNamespace(process_time=lambda: process.worked))
    return process


def test_memory_is_returned_once_after_each_growth(watched: SimpleNamespace) -> None:
    watch = MemoryWatch()
    looks = []
    # It grows too little; enough; not since then; it shrinks; it grows from there.
    for watched.resident in (100 + LARGE - 1, 100 + LARGE, 100 + LARGE, 20, 20 + LARGE):
        looks.append(watch.look())
    assert looks == [False, True, False, False, True]
    assert watched.returned == 2


def test_memory_is_returned_once_after_work(watched: SimpleNamespace) -> None:
    watch = MemoryWatch()
    looks = []
    for watched.worked in (WORK / 2, WORK, WORK * 1.5, WORK * 3, WORK * 3):
        looks.append(watch.look())
    assert looks == [False, True, False, True, False]
    assert watched.returned == 2
