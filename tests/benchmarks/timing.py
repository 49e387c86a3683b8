"""Timings that can be compared on a machine with other load."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import NamedTuple, TypeVar

Key = TypeVar("Key")

WARM_UP = 3


class Taken(NamedTuple):
    """Medians in milliseconds: wall time, and processor time of all cores together."""

    wall: float
    processor: float


def take_turns(
    contestants: Mapping[Key, Callable[[], object]], rounds: int, warm_up: int = WARM_UP, pause: float = 0.0
) -> dict[Key, Taken]:
    """Run all of them again and again, in turn, so that what else the machine does hits all of them alike.

    A pause before each lets the threads of the one before it come to rest.
    """
    for run in contestants.values():
        for _ in range(warm_up):
            run()
    walls: dict[Key, list[float]] = {key: [] for key in contestants}
    processors: dict[Key, list[float]] = {key: [] for key in contestants}
    for _ in range(rounds):
        for key, run in contestants.items():
            time.sleep(pause)
            started, used = time.perf_counter(), time.process_time()
            run()
            walls[key].append(time.perf_counter() - started)
            processors[key].append(time.process_time() - used)
    return {key: Taken(1000 * median(walls[key]), 1000 * median(processors[key])) for key in contestants}
