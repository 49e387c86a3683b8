from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from tests.helpers import tiny_run


class WholeRun(NamedTuple):
    """A run that nobody interrupted."""

    method: str
    folder: Path


@pytest.fixture(scope="session", params=["hat", "sup"])
def whole_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> WholeRun:
    return WholeRun(request.param, tiny_run(tmp_path_factory.mktemp(request.param) / "run", request.param))
