"""64 clients for a minute: with a small queue, and with the default queue."""

from __future__ import annotations

from pathlib import Path

import pytest

from serving.settings import Settings
from tests.benchmarks.conftest import Report
from tests.benchmarks.overload import Room, assert_orderly, heavy_bundle, overload
from tests.helpers_serving import serving


@pytest.mark.parametrize("room", [Room(2, 8), Room(2, Settings().queue)], ids=["little room", "default"])
def test_a_minute_of_overload(room: Room, report: Report, tmp_path: Path) -> None:
    bundle = heavy_bundle(tmp_path / "bundle")
    with serving(tmp_path / "home", bundle, settings=room.settings) as server:
        seen = overload(server, room, seconds=60, rounds=6)
    print(f"\n{seen}")
    name = f"overload, room for {room.images}"
    report.add(f"{name}, answers", seen.overloaded.rate, "1/s", seen.peak)
    report.add(f"{name}, p99 against a full queue", seen.overloaded.p99, "ms", seen.full_queue)
    report.add(f"{name}, places before an answer, p99", seen.places(99), "images", room.images)
    report.add(f"{name}, memory growth", seen.grown, "MB")
    assert_orderly(seen)
