"""Long campaigns run only when asked for: `make soak` and `make fuzz`."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="run the long campaigns")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    # The option only exists if pytest was started with this folder.
    wanted = config.getoption("soak", default=False)
    return True if collection_path.name.startswith("test_") and not wanted else None
