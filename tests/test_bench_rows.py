from __future__ import annotations

import json
from pathlib import Path

from tests.benchmarks.conftest import Report


def test_rows_are_appended_and_identify_their_run(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "bench.json"
    first, second = Report(run="monday"), Report(run="tuesday")
    first.add("one image", 2.0, "ms", baseline=8.0)
    first.append_to(path)
    second.add("one image", 3.0, "ms")
    second.append_to(path)
    assert json.loads(path.read_text()) == [
        {"name": "one image", "value": 2.0, "unit": "ms", "baseline": 8.0, "ratio": 0.25, "run": "monday"},
        {"name": "one image", "value": 3.0, "unit": "ms", "baseline": None, "ratio": None, "run": "tuesday"},
    ]
    assert Report().run.startswith("20")
