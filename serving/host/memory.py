"""Memory of workers on glibc: large pages for the weights, and large blocks that are returned to the system."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import MutableMapping
from typing import Any

LARGE = 4 * 1024 * 1024
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_TUNABLES, _LARGE_PAGES = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"


def request_large_pages(environment: MutableMapping[str, str]) -> None:
    """Make processes that are started with this environment use pages of megabytes, unless it has another choice.

    A run of the graph reads all weights: with pages of 4 kB a processor looks up thousands of addresses for it. glibc
    reads this variable when a process starts, so a worker cannot set it for itself.
    """
    tunables = environment.get(_TUNABLES, "")
    if _LARGE_PAGES not in tunables:
        environment[_TUNABLES] = ":".join(filter(None, (tunables, f"{_LARGE_PAGES}=1")))


def map_large_blocks() -> None:
    """Allocate every block of LARGE bytes or more in its own pages, which are returned when it is freed.

    By default glibc raises this threshold to the size of the largest freed block. Then the weights of each bundle
    leave holes between smaller blocks (measured: up to the size of a bundle after every few swaps), and a worker keeps
    as much memory as the largest image ever needed.
    """
    if (mallopt := _libc("mallopt")) is not None:
        mallopt(_MMAP_THRESHOLD, LARGE)
        mallopt(_TRIM_THRESHOLD, 2 * LARGE)


def release_memory() -> None:
    """Free unreachable objects now and return their memory to the system."""
    # Our requests leave no reference cycles, but a framework's may, and they may refer to a bundle.
    gc.collect()
    return_memory()


def return_memory() -> None:
    """Return free memory between blocks that are in use to the system, in a few milliseconds."""
    if (trim := _libc("malloc_trim")) is not None:
        trim(0)


def _libc(name: str) -> Any:
    return getattr(ctypes.CDLL(None), name, None)
