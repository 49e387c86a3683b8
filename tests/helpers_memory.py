"""How much memory a piece of work takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from serving.host.memory import release_memory


def peak_memory(work: Callable[[], object]) -> float:
    """The peak growth of this process in bytes during the work."""
    # Otherwise what an earlier test has freed is used again, and nothing grows.
    release_memory()
    process = Path("/proc/self")
    try:
        (process / "clear_refs").write_text("5")
    except OSError:
        pytest.skip("the kernel does not forget the peak of a process's memory")

    def kilobytes(name: str) -> int:
        (line,) = (line for line in (process / "status").read_text().splitlines() if line.startswith(name))
        return int(line.split()[1])

    before = kilobytes("VmRSS:")
    work()
    return 1024.0 * (kilobytes("VmHWM:") - before)
