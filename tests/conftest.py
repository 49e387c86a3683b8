"""Tests run beside each other in a few processes (pytest-xdist), and what they have to say is printed at the end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest

SAID = "said"

Say = Callable[[str], None]


@pytest.fixture
def say(record_property: Callable[[str, object], None]) -> Say:
    """Tell what was measured, also when all went well."""
    return lambda text: record_property(SAID, text)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Before pytest-xdist reads the marks. A file stays in one process, which makes its fixtures once. The embedded
    # default takes minutes to learn: all that needs it stays together.
    for item in items:
        group = "default" if "line" in getattr(item, "fixturenames", ()) else item.path.stem
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(autouse=True)
def whole_range_of_floats() -> Iterator[None]:
    """Learning on a CPU takes the smallest numbers for zero in its whole process, which here is that of other tests."""
    yield
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_flush_denormal(False)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    passed_or_failed = [report for kind in ("passed", "failed") for report in terminalreporter.getreports(kind)]
    for report in passed_or_failed:
        for name, text in report.user_properties if report.when == "call" else ():
            if name == SAID:
                terminalreporter.write_line(f"{report.nodeid.partition('@')[0]}\n{text}\n")
