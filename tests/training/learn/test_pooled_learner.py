"""What the first task of a run with a trunk decides for all later ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from serving.bundle.pooled import learning
from tests.helpers_photos import write_photos
from training import fit
from training.learn.pooled_state import PooledState
from training.store.checkpoint import load_finished


@pytest.mark.parametrize(("photos", "rows"), [(10, 3), (5, 2)])
def test_many_photos_per_class_in_the_first_task_get_the_wider_expansion(
    photos: int, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"ROWS": 2, "MANY_ROWS": 3, "MANY_PHOTOS": 6}.items():
        monkeypatch.setattr(learning, name, value)
    folder = write_photos(tmp_path / "photos", disc=photos, stripes=photos, checks=15 - photos, ring=15 - photos)
    words = ["--tasks", "disc,stripes; checks,ring", "--quick", "--size", "64", "--out", str(tmp_path / "run")]
    assert fit.main(["--data", str(folder), *words]) == 0
    config, checkpoint = load_finished(tmp_path / "run")
    state = PooledState.of(checkpoint, config)
    found = [state.statistics.projection.rows, *(each.projection.rows for each in state.classifiers)]
    # A classifier needs no expansion unless its ridge regression uses it.
    assert found[0] == rows
    assert set(found) <= {rows, 0}
