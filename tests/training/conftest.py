from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Results depend on the number of threads, and a forked process has only one."""
    torch.set_num_threads(1)


class WholeRun(NamedTuple):
    """A run that was not interrupted."""

    method: str
    folder: Path


@pytest.fixture(scope="session", params=["hat", "sup"])
def whole_run(request: pytest.FixtureRequest) -> WholeRun:
    return WholeRun(request.param, request.getfixturevalue(f"tiny_{request.param}"))
