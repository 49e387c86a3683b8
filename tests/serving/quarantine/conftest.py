from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from serving.quarantine.store import Store
from tests.helpers_quarantine import Counters, Place, Postgres


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Every test that uses it runs on both databases."""
    images = str(tmp_path / "images")
    if request.param == "sqlite":
        return Place(f"sqlite:///{tmp_path}/quarantine.db", images)
    server: Postgres = request.getfixturevalue("running_postgres")
    return Place(server.new_database(), images, server)


@pytest.fixture
def store(place: Place) -> Iterator[Store]:
    opened = place.open()
    yield opened
    opened.close()


@pytest.fixture
def counted() -> Counters:
    return Counters()
