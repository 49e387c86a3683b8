"""Memory of workers on glibc: large pages for the weights, and large blocks that are returned to the system."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

LARGE = 4 * 1024 * 1024
WORK = 0.1
"""Seconds of processor time: a few requests with photos, or what a worker without requests uses in 20 seconds."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_ARENAS = 2
"""One for the first thread, which has the event loop, and one for all others."""
_TUNABLES, _LARGE_PAGES = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"


def request_large_pages(environment: MutableMapping[str, str]) -> None:
    """Make processes that are started with this environment use pages of megabytes, unless it has another choice.

    A run of the graph reads all weights: with pages of 4 kB a processor looks up thousands of addresses for it. glibc
    reads this variable when a process starts, so a worker cannot set it for itself.
    """
    tunables = environment.get(_TUNABLES, "")
    if _LARGE_PAGES not in tunables:
        environment[_TUNABLES] = ":".join(filter(None, (tunables, f"{_LARGE_PAGES}=1")))


def limit_free_memory() -> None:
    """Limit what malloc keeps of freed memory. Call it before the threads are started.

    Every block of LARGE bytes or more gets its own pages, which are returned when it is freed. By default glibc raises
    this threshold to the size of the largest freed block. Then the weights of each bundle leave holes between smaller
    blocks (measured: up to the size of a bundle after every few swaps), and a worker keeps as much memory as the
    largest image ever needed.

    All threads but the first share one arena. By default there are up to eight per processor, each of which keeps free
    memory up to the second threshold at its end, where malloc_trim does not look.
    """
    if (mallopt := _libc("mallopt")) is not None:
        mallopt(_MMAP_THRESHOLD, LARGE)
        mallopt(_TRIM_THRESHOLD, 2 * LARGE)
        mallopt(_ARENA_MAX, _ARENAS)


def release_memory() -> None:
    """Free unreachable objects now and return their memory to the system."""
    # Our requests leave no reference cycles, but a framework's may, and they may refer to a bundle.
    gc.collect()
    return_memory()


def return_memory() -> None:
    """Return free memory between blocks that are in use to the system, in a few milliseconds."""
    if (trim := _libc("malloc_trim")) is not None:
        trim(0)


class MemoryWatch:
    """A thread that returns free memory after work, and when this process has grown.

    All requests leave holes between blocks in use, small ones as well. With large pages the kernel fills every hole
    that it comes across, also in a process that does nothing. It is a thread, because returning memory would delay an
    event loop by milliseconds.
    """

    def __init__(self, every: float = 5.0) -> None:
        self._every = every
        self._least = resident()
        """The least that this process has had since it returned memory."""
        self._worked = time.process_time()
        """The processor time that it had used by then."""
        self._end = threading.Event()

    def start(self) -> None:
        """Begin to watch, where the system has what that needs."""
        if self._least and _libc("malloc_trim") is not None:
            threading.Thread(target=self._run, name="memory", daemon=True).start()

    def close(self) -> None:
        self._end.set()

    def look(self) -> bool:
        """Return free memory if this process has worked, or has grown by LARGE or more; whether it has."""
        now = resident()
        due = time.process_time() - self._worked >= WORK or now - self._least >= LARGE
        if due:
            return_memory()
            self._worked = time.process_time()
        self._least = resident() if due else min(self._least, now)
        return due

    def _run(self) -> None:
        while not self._end.wait(self._every):
            self.look()


def resident() -> int:
    """The bytes of this process that are in memory; 0 where the system does not report it."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _libc(name: str) -> Any:
    return getattr(ctypes.CDLL(None), name, None)
