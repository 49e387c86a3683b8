from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from serving.bundle.model import BundleModel
from tests.helpers_quarantine import Postgres, postgres, postgres_binaries
from tests.helpers_serving import PATIENCE, Server, serving, write_bundle


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A valid bundle; tests that damage one write their own."""
    return write_bundle(tmp_path_factory.mktemp("valid") / "bundle")


@pytest.fixture(scope="session")
def model(bundle: Path) -> BundleModel:
    return BundleModel.load(bundle, provider="cpu")


@pytest.fixture(scope="session")
def server(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With the default settings, started without an address."""
    with serving(tmp_path_factory.mktemp("home"), bundle, host=None) as running:
        yield running


@pytest.fixture(scope="session")
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
        yield client


@pytest.fixture(scope="session")
def running_postgres() -> Iterator[Postgres]:
    binaries = postgres_binaries()
    if binaries is None:
        pytest.skip("no PostgreSQL server is installed (Debian: apt-get install postgresql)")
    with postgres(binaries) as server:
        yield server
