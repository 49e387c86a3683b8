from __future__ import annotations

import os
from pathlib import Path

import pytest

from serving.host.cpus import available_cpus, plan_cpus
from serving.settings import Settings


def write(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


@pytest.fixture
def eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


V2 = "proc/self/cgroup"


@pytest.mark.usefixtures("eight_cpus")
@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({}, 8),
        ({V2: "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 8),
        ({V2: "0::/\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2),
        ({V2: "0::/\n", "sys/fs/cgroup/cpu.max": "250000 100000\n"}, 2),
        ({V2: "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        ({V2: "0::/\n", "sys/fs/cgroup/cpu.max": "9900000 100000\n"}, 8),
        (
            {
                V2: "0::/pod/container\n",
                "sys/fs/cgroup/pod/cpu.max": "300000 100000\n",
                "sys/fs/cgroup/pod/container/cpu.max": "max 100000\n",
            },
            3,
        ),
        (
            {
                V2: "4:memory:/x\n3:cpu,cpuacct:/docker/abc\n0::/\n",
                "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "400000\n",
                "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000\n",
            },
            4,
        ),
        (
            {
                V2: "3:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            8,
        ),
    ],
    ids=[
        "no groups",
        "no quota",
        "v2",
        "v2 and a half",
        "v2 half",
        "v2 more than there are",
        "v2 parent",
        "v1",
        "v1 no",
    ],
)
def test_processors_are_those_of_the_container(tmp_path: Path, files: dict[str, str], cpus: int) -> None:
    assert available_cpus(write(tmp_path, files)) == cpus


def test_affinity_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    assert available_cpus(tmp_path) == 1


@pytest.mark.parametrize(
    ("settings", "cpus", "expected"),
    [
        (Settings(provider="cpu"), 4, (4, 1)),
        (Settings(provider="cpu"), 64, (16, 4)),
        (Settings(provider="cpu", workers=2), 8, (2, 4)),
        (Settings(provider="cpu", workers=4), 2, (4, 1)),
        (Settings(provider="cpu", workers=2, threads=3), 8, (2, 3)),
        (Settings(provider="cuda"), 8, (1, 8)),
    ],
)
def test_workers_and_threads_share_the_processors(settings: Settings, cpus: int, expected: tuple[int, int]) -> None:
    found = plan_cpus(settings, cpus)
    assert (found.workers, found.threads) == expected


def test_auto_takes_the_gpu_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.bundle.providers.nvidia_visible", lambda: True)
    assert plan_cpus(Settings(), 8).workers == 1
    monkeypatch.setattr("serving.bundle.providers.nvidia_visible", lambda: False)
    assert plan_cpus(Settings(), 8).workers == 8
