"""Tests run beside each other in a few processes (pytest-xdist), and what they have to say is printed at the end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

SAID = "said"
WITH_DEFAULT = {f"tests/e2e/test_{name}.py" for name in ("default", "loop", "precisions")}
"""What needs the embedded default, which takes minutes to learn."""

Say = Callable[[str], None]


@pytest.fixture
def say(record_property: Callable[[str, object], None]) -> Say:
    """Tell what was measured, also when all went well."""
    return lambda text: record_property(SAID, text)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        """A file stays in one process, which makes its fixtures once; so do the files that share the default."""

        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "default" if file in WITH_DEFAULT else file

    return ByFile(config, log)


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
                terminalreporter.write_line(f"{report.nodeid}\n{text}\n")
