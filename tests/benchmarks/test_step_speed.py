"""The cost of an optimiser step of step 1: against the authors' code, by batch size, and by number of earlier tasks.

Contestants take turns, each in a process of its own, and medians are compared; times mean something only as ratios
within one run.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import TypeVar

import pytest

from models.config import ROTATIONS
from tests.benchmarks import step_worker
from tests.benchmarks.conftest import Report, table
from tests.benchmarks.timing import take_turns
from training.learn.augment import PAIR

ROUNDS = 3
AS_FAST = 1.5
SIZES = {"mnist": 64, "resnet18": 64}
"""Images per batch, as in the presets. Small batches reuse freed memory anyway, so there is less to gain."""
GROWING = (16, 32, 64)
DOUBLED = 2.5
"""Upper limit of the factor in memory and time for twice the images."""
LATER = 1.15
"""Upper limit of the cost of learning task 20 relative to task 2."""

Key = TypeVar("Key")


class Worker:
    """A process that runs a step on request."""

    def __init__(self, contestant: str, network: str, size: int, tasks: int = 0) -> None:
        command = [sys.executable, "-m", step_worker.__name__, contestant, network, str(size), str(tasks)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self.megabytes = 0.0

    def step(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("step\n")
        self.megabytes = float(self.process.stdout.readline())

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextmanager
def working(workers: Mapping[Key, Worker]) -> Iterator[dict[Key, Callable[[], object]]]:
    """Their steps, as contestants."""
    try:
        yield {key: worker.step for key, worker in workers.items()}
    finally:
        for worker in workers.values():
            worker.stop()


@pytest.mark.parametrize("network", SIZES)
def test_step_one_is_faster_than_a_plain_loop(network: str, report: Report) -> None:
    size = SIZES[network]
    names = ("authors", "authors, prepared", "ours")
    with working({name: Worker(name, network, size) for name in names}) as steps:
        # A step takes up to a minute, and the second is as fast as all later ones.
        taken = take_turns(steps, ROUNDS, warm_up=1)
    speed = {name: 1000 * PAIR * ROTATIONS * step_worker.BATCHES * size / taken[name].wall for name in names}
    for name in names[1:]:
        report.add(f"step 1, {network}, {name}", speed[name], "augmented images/s", speed["authors"])
    rows = [(name, f"{speed[name]:.0f}", f"{speed[name] / speed['authors']:.2f}") for name in names]
    print(f"\n\n{table((f'{network}, batches of {size}', 'augmented images/s', 'times as fast'), rows)}")
    assert speed["ours"] / speed["authors"] >= AS_FAST


def test_time_and_memory_grow_with_the_batch_and_not_faster(report: Report) -> None:
    workers = {size: Worker("ours", "mnist", size) for size in GROWING}
    with working(workers) as steps:
        taken = take_turns(steps, ROUNDS)
        memory = {size: worker.megabytes for size, worker in workers.items()}
    for size in GROWING[1:]:
        report.add(f"step 1, mnist, batches of {size}", taken[size].wall, "ms", taken[GROWING[0]].wall)
        report.add(f"step 1, mnist, batches of {size}, peak memory", memory[size], "MB", memory[GROWING[0]])
    rows = [(str(size), f"{taken[size].wall:.0f}", f"{memory[size]:.0f}") for size in GROWING]
    print(f"\n\n{table(('images a batch', 'ms for two steps', 'MB at most, torch included'), rows)}")
    for small, large in pairwise(GROWING):
        assert taken[large].wall / taken[small].wall <= DOUBLED
        assert memory[large] / memory[small] <= DOUBLED


def test_a_later_task_costs_no_more_than_an_early_one(report: Report) -> None:
    with working({tasks: Worker("ours", "mnist", GROWING[0], tasks) for tasks in (1, 19)}) as steps:
        taken = take_turns(steps, 5 * ROUNDS)
    early, late = taken[1].wall, taken[19].wall
    report.add("step 1, mnist, task 20 against task 2", late, "ms", early)
    print(f"\n\nmnist, batches of {GROWING[0]}: two steps of task 2 take {early:.0f} ms, of task 20 {late:.0f} ms")
    assert late / early <= LATER
