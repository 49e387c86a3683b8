from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.helpers import tiny_run


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Other numbers of threads round otherwise, and a copied process has but one."""
    torch.set_num_threads(1)


class WholeRun(NamedTuple):
    """A run that nobody interrupted."""

    method: str
    folder: Path


@pytest.fixture(scope="session", params=["hat", "sup"])
def whole_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> WholeRun:
    return WholeRun(request.param, tiny_run(tmp_path_factory.mktemp(request.param) / "run", request.param))
