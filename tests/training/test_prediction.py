"""The validation images by which an evaluation chooses what it was not told."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import TINY_PRESET, tiny_source
from training.config import Lesson, RunConfig
from training.datasets import SOURCES, DataError
from training.prediction import validation_images
from training.sources import Sources


def test_validation_images_that_are_gone_are_said_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(SOURCES, "tiny", tiny_source)
    gone = Lesson((("zero", "one"),), "folder", str(tmp_path / "gone"))
    config = RunConfig(TINY_PRESET, 0, (gone, Lesson((("two", "three"),), "tiny")))
    held = validation_images(config, Sources(config))
    # 40 % of ten images of each class.
    assert sorted(held.class_ids.tolist()) == [2] * 4 + [3] * 4
    assert f"no validation images of zero, one: {tmp_path}/gone: no such folder" in caplog.text
    alone = RunConfig(TINY_PRESET, 0, (gone,))
    with pytest.raises(DataError, match=rf"^no validation images of zero, one: {tmp_path}/gone: no such folder"):
        validation_images(alone, Sources(alone))
