"""What the machine, and the container around this process, really give: processors and an NVIDIA device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from serving.settings import Settings

MOST_WORKERS = 16
"""More are started only if asked for: each holds its own copy of the graph."""


@dataclass(frozen=True)
class Plan:
    """How the processors are shared out."""

    workers: int
    threads: int
    """Of one worker, for one run of the graph."""


def plan(settings: Settings, cpus: int) -> Plan:
    """One worker a processor, each running the graph on one thread, unless a GPU does the work or it is asked for.

    Measured: two workers of one thread answer almost twice as much as one worker of two threads.
    """
    workers = settings.workers or (1 if wants_cuda(settings.provider) else min(cpus, MOST_WORKERS))
    return Plan(workers, settings.threads or max(1, cpus // workers))


def wants_cuda(provider: str) -> bool:
    """Whether a session will be asked for on the GPU."""
    return provider == "cuda" or (provider == "auto" and nvidia_visible())


def nvidia_visible() -> bool:
    """A cheap look: asking onnxruntime for CUDA where there is none costs time and prints errors."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()


def available_cpus(root: Path = Path("/")) -> int:
    """Processors that this process may use: its affinity, and the quota of every control group around it."""
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
            # A container's own group is mounted as the root; on the host the path has to be walked.
            for folder in _with_parents(mount, group):
                yield from _quota_v2(folder)
        elif "cpu" in controllers.split(","):
            for name in (controllers, "cpu"):
                for folder in _with_parents(mount / name, group):
                    yield from _quota_v1(folder)


def _with_parents(mount: Path, group: str) -> Iterator[Path]:
    folder = mount / group.strip("/")
    while folder != mount:
        yield folder
        folder = folder.parent
    yield mount


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
