"""The parameters that a rule fits on validation images, and how it evaluates a run after each of its tasks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from serving.bundle.decision import Rule, TaskRule
from tests.helpers import TINY_PRESET, network_of_two_tasks, random_photos, tiny_source
from training.config import Lesson, RunConfig
from training.data.datasets import SOURCES
from training.data.images import DataError
from training.data.sources import Sources
from training.learn.correction import Correction
from training.measure.alternative_rules import AlternativeRule, RuleFitter, validation_images
from training.measure.metrics import first_tasks
from training.measure.odin import Odin, odin_logits
from training.measure.task_prediction import ODIN, TaskPredictor


def test_missing_validation_images_are_reported_and_left_out(
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


def test_odin_uses_the_corrections_that_the_run_had_after_each_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SOURCES, "tiny", tiny_source)
    config = RunConfig(TINY_PRESET, 0, (Lesson((("zero", "one"), ("two", "three")), "tiny"),))
    network, cpu = network_of_two_tasks(), torch.device("cpu")
    rule = Rule(tasks=(TaskRule.fit([0.0, 1.0], 2), TaskRule.fit([0.0, 1.0], 2)))
    scales = ([0.2], [3.0, 0.5])
    history = tuple(tuple(Correction(scale, 1.0) for scale in then) for then in scales)
    odin = Odin(2.0, 0.05)
    run = SimpleNamespace(
        config=config, network=network, rule=rule, correction_history=history, need_network=lambda what: network
    )
    fitted = RuleFitter(run, Sources(config), cpu).fit(AlternativeRule(is_corrected=True, with_odin=True, odin=odin))
    pixels = random_photos(9, seed=3)
    outputs = fitted.outputs(pixels)
    for count, then in enumerate(scales, start=1):
        read = fitted.decide(*first_tasks(outputs, rule, count))
        wanted = TaskPredictor(ODIN)(odin_logits(network, pixels, odin, cpu, then), Rule(tasks=rule.tasks[:count]))
        assert read.class_id.tolist() == wanted.class_id.tolist()
        np.testing.assert_array_equal(read.probability, wanted.probability)
    # The last corrections would give another result after the first task.
    last = odin_logits(network, pixels, odin, cpu, scales[-1])["logits"][:, :2]
    assert not np.allclose(last, odin_logits(network, pixels, odin, cpu, scales[0])["logits"])
