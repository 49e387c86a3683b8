"""The processors that this process may use, and how a server's workers share them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from serving.bundle.providers import wants_cuda
from serving.settings import Settings

MOST_WORKERS = 16
"""More workers are started only on request: each has its own copy of the graph."""


@dataclass(frozen=True)
class CpuPlan:
    """How the processors are shared between workers."""

    workers: int
    threads: int
    """The threads that run the graph in one worker."""


def plan_cpus(settings: Settings, cpus: int) -> CpuPlan:
    """One worker per processor with one thread each, unless a GPU runs the graph or the settings have other numbers.

    Measured: two workers with one thread answer almost twice as many requests as one worker with two threads.
    """
    workers = settings.workers or (1 if wants_cuda(settings.provider) else min(cpus, MOST_WORKERS))
    return CpuPlan(workers, settings.threads or max(1, cpus // workers))


def available_cpus(root: Path = Path("/")) -> int:
    """The processors of this process: its CPU affinity, limited by the quota of every control group around it."""
    return max(1, int(min([len(os.sched_getaffinity(0)), *_quotas(root)])))


def _quotas(root: Path) -> Iterator[float]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mount = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if not controllers:
            # In a container its own group is mounted as the root; on the host the path leads to it.
            for folder in _with_parents(mount, group):
                yield from _quota_v2(folder)
        elif "cpu" in controllers.split(","):
            for name in (controllers, "cpu"):
                for folder in _with_parents(mount / name, group):
                    yield from _quota_v1(folder)


def _with_parents(mount: Path, group: str) -> Iterator[Path]:
    folder = mount / group.strip("/")
    yield from (path for path in (folder, *folder.parents) if path.is_relative_to(mount))


def _quota_v2(folder: Path) -> Iterator[float]:
    words = _words(folder / "cpu.max")
    if len(words) == 2 and words[0] != "max":
        yield int(words[0]) / int(words[1])


def _quota_v1(folder: Path) -> Iterator[float]:
    quota, period = _words(folder / "cpu.cfs_quota_us"), _words(folder / "cpu.cfs_period_us")
    if quota and period and int(quota[0]) > 0:
        yield int(quota[0]) / int(period[0])


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
