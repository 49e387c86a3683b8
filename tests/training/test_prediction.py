"""What an evaluation chooses by validation images, and how it reads a run as it was."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from serving.decision import Rule, TaskRule
from tests.helpers import TINY_PRESET, network_of_two_tasks, random_photos, tiny_source
from training.calibration import Correction
from training.config import Lesson, RunConfig
from training.datasets import SOURCES
from training.images import DataError
from training.metrics import first_tasks
from training.odin import Odin, odin_logits
from training.prediction import ReaderMaker, Reading, validation_images
from training.sources import Sources
from training.task_prediction import ODIN, TaskPredictor


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


def test_odin_reads_a_run_with_the_corrections_that_it_had_after_each_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SOURCES, "tiny", tiny_source)
    config = RunConfig(TINY_PRESET, 0, (Lesson((("zero", "one"), ("two", "three")), "tiny"),))
    network, cpu = network_of_two_tasks(), torch.device("cpu")
    rule = Rule(tasks=(TaskRule.fit([0.0, 1.0], 2), TaskRule.fit([0.0, 1.0], 2)))
    scales = ([0.2], [3.0, 0.5])
    history = tuple(tuple(Correction(scale, 1.0) for scale in then) for then in scales)
    odin = Odin(2.0, 0.05)
    maker = ReaderMaker(config, network, rule, history, None, Sources(config), cpu)
    reader = maker.make(Reading(is_corrected=True, with_odin=True, odin=odin))
    pixels = random_photos(9, seed=3)
    outputs = reader.says(pixels)
    for count, then in enumerate(scales, start=1):
        read = reader.decide(*first_tasks(outputs, rule, count))
        wanted = TaskPredictor(ODIN)(odin_logits(network, pixels, odin, cpu, then), Rule(tasks=rule.tasks[:count]))
        assert read.class_id.tolist() == wanted.class_id.tolist()
        np.testing.assert_array_equal(read.probability, wanted.probability)
    # After the first task the last corrections would have said something else.
    last = odin_logits(network, pixels, odin, cpu, scales[-1])["logits"][:, :2]
    assert not np.allclose(last, odin_logits(network, pixels, odin, cpu, scales[0])["logits"])
