from __future__ import annotations

from pathlib import Path

import pytest

from models.trunks.stored_graphs import stored
from models.trunks.wrapped import Wrapped
from tests.helpers_process import little_room

KEY: dict[str, object] = {"name": "a network", "size": 32}
GRAPH = Wrapped(bytes(range(256)) * 4, (4, 8), ("one", "two"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OPENWORLD_CACHE", str(tmp_path))
    return tmp_path / "graphs"


def not_made() -> Wrapped:
    raise AssertionError("a stored graph is not made again")


def test_a_graph_is_made_once_and_then_read(cache: Path) -> None:
    assert stored(KEY, lambda: GRAPH) == stored(KEY, not_made) == GRAPH
    assert len(list(cache.iterdir())) == 1


def test_a_damaged_file_counts_as_missing(cache: Path) -> None:
    stored(KEY, lambda: GRAPH)
    (file,) = cache.iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    assert stored(KEY, lambda: GRAPH) == stored(KEY, not_made) == GRAPH


def test_a_write_that_fails_leaves_nothing_behind(cache: Path) -> None:
    with little_room(100):
        assert stored(KEY, lambda: GRAPH) == GRAPH
    assert list(cache.iterdir()) == []
