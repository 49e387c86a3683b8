"""Full disks, and processes that die: forked from the test process, as a new one would import torch for seconds."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import pytest
import torch

forks = pytest.mark.skipif(torch.cuda.is_available(), reason="a process that uses a GPU cannot be copied")


def ended(work: Callable[[], object]) -> int:
    """Do this work in a fork of this process and return its exit code: 0, or a negative signal number."""
    process = os.fork()
    if process == 0:
        try:
            # OpenMP's other threads are not forked, and the process would wait for them.
            torch.set_num_threads(1)
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def die_at_call(owner: Any, name: str, number: int, *, after: bool = False) -> None:
    """End the process as by kill -9 at the given call of a function; only for use in a forked process."""
    real, count = getattr(owner, name), 0

    def call(*arguments: Any, **named: Any) -> Any:
        nonlocal count
        count += 1
        if count == number and not after:
            die()
        result = real(*arguments, **named)
        if count == number:
            die()
        return result

    setattr(owner, name, call)


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("nobody survives that")


@contextmanager
def little_room(size: int) -> Iterator[None]:
    """Simulate a full disk: no file can grow beyond this many bytes."""
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
