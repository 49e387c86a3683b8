from __future__ import annotations

from pathlib import Path

import pytest

from export.inspect import inspect, main
from tests.export.conftest import Exported


def test_units_are_the_live_ones_of_every_layer(exported_hat: Exported) -> None:
    masks = exported_hat.run.network.unit_masks()
    for task, part in enumerate(inspect(exported_hat.bundle)):
        # The last mask is the projection's, which is not exported.
        assert part.units == tuple(len(mask.live(task)) for mask in masks[:-1])
        assert part.labels == exported_hat.run.config.tasks[task]
        assert part.milliseconds > 0


def test_multiplications_by_hand(exported: Exported) -> None:
    config = exported.run.network.config
    part = inspect(exported.bundle)[0]
    side, before, macs = config.height, config.channels, 0
    for units, kernel in zip(part.units[:-1], (3, 3, 2), strict=True):
        side = side + 2 * (kernel // 2) - kernel + 1
        macs += units * before * kernel**2 * side**2
        side, before = side // 2, units
    macs += part.units[-1] * before * side**2
    assert part.macs == 4 * macs


def test_parts_hold_almost_all_of_the_graph(exported: Exported) -> None:
    stored = sum(part.stored_bytes for part in inspect(exported.bundle))
    assert 0.2 * len(exported.bundle.graph) < stored < len(exported.bundle.graph)


def test_the_command_shows_tasks_and_verification(exported: Exported, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(exported.bundle.path)]) == 0
    shown = capsys.readouterr().out
    assert exported.bundle.manifest.version in shown
    assert "logits difference batch 7" in shown


def test_no_bundle_is_2_and_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error: ")
