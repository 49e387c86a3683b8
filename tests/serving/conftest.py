from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from serving.bundle.model import Model
from tests.helpers_serving import PATIENCE, Server, serving, write_bundle


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A valid bundle; tests that damage one write their own."""
    return write_bundle(tmp_path_factory.mktemp("valid") / "bundle")


@pytest.fixture(scope="session")
def model(bundle: Path) -> Model:
    return Model.load(bundle, provider="cpu")


@pytest.fixture(scope="session")
def server(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("home"), bundle) as running:
        yield running


@pytest.fixture(scope="session")
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
        yield client
