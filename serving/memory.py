"""How workers hold memory where there is glibc: in large pages, and what is large goes back to the machine."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import MutableMapping
from typing import Any

LARGE = 4 * 1024 * 1024
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_TUNABLES, _LARGE_PAGES = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"


def ask_for_large_pages(environment: MutableMapping[str, str]) -> None:
    """Let what is started with this environment ask the kernel for pages of megabytes, unless it says otherwise.

    A run of the graph walks through all weights: in pages of 4 kB a processor looks up thousands of addresses for it.
    glibc reads this when a process begins, so that a worker cannot ask for itself.
    """
    said = environment.get(_TUNABLES, "")
    if _LARGE_PAGES not in said:
        environment[_TUNABLES] = ":".join(filter(None, (said, f"{_LARGE_PAGES}=1")))


def keep_large_blocks_apart() -> None:
    """Give every block of LARGE bytes or more pages of its own, which go back when it is freed.

    glibc stops to do so for blocks as large as any that was freed before: the weights of each bundle would then leave
    holes between smaller things, as measured up to the size of a bundle after every few swaps, and a worker would keep
    as much as the largest image ever took.
    """
    if (mallopt := _libc("mallopt")) is not None:
        mallopt(_MMAP_THRESHOLD, LARGE)
        mallopt(_TRIM_THRESHOLD, 2 * LARGE)


def give_back() -> None:
    """What nothing leads to any more is gone now, and not when there happens to be time."""
    # Requests of ours leave no cycles; those of a framework may lead to what was asked of a bundle.
    gc.collect()
    if (trim := _libc("malloc_trim")) is not None:
        trim(0)


def _libc(name: str) -> Any:
    return getattr(ctypes.CDLL(None), name, None)
