"""Work on many things in a few threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice
from typing import TypeVar

Given = TypeVar("Given")
Made = TypeVar("Made")


def in_threads(threads: int, work: Callable[[Given], Made], items: Iterable[Given]) -> Iterator[Made]:
    """The results in any order; only twice as many items as threads are in work or waiting at a time."""
    waiting = iter(items)
    with ThreadPoolExecutor(threads) as pool:
        running: set[Future[Made]] = {pool.submit(work, item) for item in islice(waiting, 2 * threads)}
        try:
            while running:
                finished, running = wait(running, return_when=FIRST_COMPLETED)
                # New work first: what the caller does with the results need not hold up the threads.
                running |= {pool.submit(work, item) for item in islice(waiting, len(finished))}
                for future in finished:
                    yield future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def chunked(items: Sequence[Given], size: int) -> Iterator[Sequence[Given]]:
    """The items in parts of up to `size`."""
    return (items[start : start + size] for start in range(0, len(items), size))
