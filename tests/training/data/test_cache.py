"""Everything in the cache counts: vectors, digests and exported graphs."""

from __future__ import annotations

from pathlib import Path

import pytest

from models.trunks.cache_settings import FOLDER_VARIABLE, LIMIT_VARIABLE
from models.trunks.stored_graphs import GRAPHS
from training.cache import main
from training.data.cache import Cache, clear, parts

KILOBYTE = 1000


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def put_graph(folder: Path, size: int) -> Path:
    place = folder / GRAPHS
    place.mkdir(parents=True)
    (place / "some.onnx").write_bytes(bytes(size))
    return place


def test_graphs_are_shown_and_cleared(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put_graph(folder, 3000 * KILOBYTE)
    assert main([]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert "3.0 MB of" in shown[0]
    assert shown[1].split() == ["3.0", "MB", *shown[1].split()[2:-2], "exported", "graphs"]
    assert clear(folder) == 3000 * KILOBYTE
    assert parts(folder) == []


def test_graphs_count_for_the_limit_and_make_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, "0.001")
    place = put_graph(folder, 900 * KILOBYTE)
    cache = Cache()
    records = cache.vectors("a" * 8, 50, {"trunk": "x", "size": 32, "view": "plain"})
    assert not cache.make_room(records, 100, restart=False)
    assert place.exists(), "20 kB fit beside them"
    assert not cache.make_room(records, 1000, restart=False)
    assert not place.exists(), "200 kB do not"
