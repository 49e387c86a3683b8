"""Tests run in several processes (pytest-xdist); the lines that they report are printed at the end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from serving.quarantine.store import Store

REPORT_LINE = "report_line"
DEFAULT = "tests/e2e/test_default.py"
WITH_DEFAULT = {f"tests/e2e/test_{name}.py" for name in ("loop", "make_demo", "precisions", "readme")}
"""The test file whose process learns the embedded default, which takes minutes, and others that need it."""
BEFORE_DEFAULT = ("tests/e2e/", "tests/export/", "tests/models/", "tests/recipes/")
"""Tests that run while the default is learned."""
LONGEST_FIRST = (
    "tests/e2e/test_photos.py",
    "tests/e2e/test_photo_adapters.py",
    "tests/e2e/test_teach_page.py",
    "tests/e2e/test_fuzz.py",
    "tests/e2e/test_readme.py",
    "tests/e2e/test_make_demo.py",
    "tests/serving/quarantine/test_quarantine_server.py",
    "tests/training/test_add_task.py",
    "tests/training/test_resume.py",
    "tests/training/host/test_distributed.py",
    "tests/training/test_systems.py",
    "tests/test_ray.py",
    "tests/test_tutorial.py",
)
"""Files that take half a minute or more: if one of them came last, the other processes would wait for it."""

ReportLine = Callable[[str], None]


@pytest.fixture
def report_line(record_property: Callable[[str, object], None]) -> ReportLine:
    """Print a line with measurements in the summary, also when the test passes."""
    return lambda text: record_property(REPORT_LINE, text)


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests, and the processes that they start, do not touch the user's cache of encoded images."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENWORLD_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def tiny_hat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished HAT run that all tests of a process share; a test that changes it works on a copy."""
    return _tiny_run(tmp_path_factory, "hat")


@pytest.fixture(scope="session")
def tiny_sup(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished Sup run, shared in the same way."""
    return _tiny_run(tmp_path_factory, "sup")


def _tiny_run(factory: pytest.TempPathFactory, method: str) -> Path:
    import torch

    from tests.helpers import tiny_run

    # Results depend on the number of threads, and some tests compare the run bit by bit with their own run.
    torch.set_num_threads(1)
    return tiny_run(factory.mktemp(f"tiny-{method}") / "run", method)


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Of an empty quarantine."""
    return f"sqlite:///{tmp_path}/quarantine.db"


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    """The quarantine at `url`, opened."""
    from serving.quarantine.store import Store

    opened = Store.open(url)
    yield opened
    opened.close()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        """All tests of a file run in one process, so its fixtures run once."""

        def _split_scope(self, nodeid: str) -> str:
            return nodeid.partition("::")[0]

    return ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The process that learns the default begins with it; tests that need it wait until it is likely to be there."""

    def turn(item: pytest.Item) -> tuple[int, int]:
        file = item.nodeid.partition("::")[0]
        place = LONGEST_FIRST.index(file) if file in LONGEST_FIRST else len(LONGEST_FIRST)
        if file == DEFAULT:
            return 0, place
        if file in WITH_DEFAULT:
            return 2, place
        return 1 if file.startswith(BEFORE_DEFAULT) else 3, place

    items.sort(key=turn)


@pytest.fixture(autouse=True)
def whole_range_of_floats() -> Iterator[None]:
    """Training on a CPU flushes denormals to zero in the whole process; undo that for the tests that follow."""
    yield
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_flush_denormal(False)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    passed_or_failed = [report for kind in ("passed", "failed") for report in terminalreporter.getreports(kind)]
    for report in passed_or_failed:
        for name, text in report.user_properties if report.when == "call" else ():
            if name == REPORT_LINE:
                terminalreporter.write_line(f"{report.nodeid}\n{text}\n")
