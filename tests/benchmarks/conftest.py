"""Benchmarks run only when asked for: `pytest tests/benchmarks --benchmarks -s`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--benchmarks", action="store_true", help="run the benchmarks")
    parser.addoption("--bench-json", type=Path, default=Path("runs/bench.json"), help="where rows are appended")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    # The option only exists if pytest was started with this folder.
    wanted = config.getoption("benchmarks", default=False)
    return True if collection_path.name.startswith("test_") and not wanted else None


@dataclass(frozen=True)
class Row:
    """A measured value, and the value that it is compared with."""

    name: str
    value: float
    unit: str
    baseline: float | None = None

    @property
    def ratio(self) -> float | None:
        return None if self.baseline is None else self.value / self.baseline


@dataclass
class Report:
    """Rows of this run, which is identified by its start time."""

    run: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="milliseconds"))
    rows: list[Row] = field(default_factory=list)

    def add(self, name: str, value: float, unit: str, baseline: float | None = None) -> None:
        self.rows.append(Row(name, value, unit, baseline))

    def append_to(self, path: Path) -> None:
        """Add the rows to those of earlier runs."""
        path.parent.mkdir(parents=True, exist_ok=True)
        before = json.loads(path.read_text()) if path.exists() else []
        rows = [{**asdict(row), "ratio": row.ratio, "run": self.run} for row in self.rows]
        path.write_text(json.dumps([*before, *rows], indent=1) + "\n")


@pytest.fixture(scope="session")
def report(request: pytest.FixtureRequest) -> Iterator[Report]:
    """Collects rows; afterwards they are appended to the file of all runs."""
    gathered = Report()
    yield gathered
    path: Path = request.config.getoption("--bench-json")
    gathered.append_to(path)
    print(f"\n{len(gathered.rows)} rows appended to {path}")


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
