"""64 clients for a minute: with little room, and with the room that a server has by default."""

from __future__ import annotations

from pathlib import Path

import pytest

from serving.settings import Settings
from tests.benchmarks.conftest import Report
from tests.benchmarks.overload import QUEUE, assert_orderly, heavy_bundle, overload, settings
from tests.helpers_serving import serving


@pytest.mark.parametrize("queue", [QUEUE, Settings.queue], ids=["little room", "default"])
def test_a_minute_of_overload(queue: int, report: Report, tmp_path: Path) -> None:
    bundle = heavy_bundle(tmp_path / "bundle")
    with serving(tmp_path / "home", bundle, settings=settings(queue)) as server:
        seen = overload(server, seconds=60, rounds=6, queue=queue)
    print(f"\n{seen}")
    name = f"overload, queue {queue}"
    report.add(f"{name}, answers", seen.overloaded.rate, "1/s", seen.peak.rate)
    report.add(f"{name}, p99 against a full queue", seen.overloaded.p99, "ms", seen.full_queue)
    report.add(f"{name}, memory growth", seen.grown, "MB")
    assert_orderly(seen)
