"""The comparison with other learners, as far as it runs without Avalanche and without a long run."""

from __future__ import annotations

import numpy as np
import pytest

from tests.benchmarks import alternative_data, photo_learners
from tests.benchmarks.alternative_data import SETTINGS
from tests.benchmarks.feature_learners import LEARNERS
from tests.benchmarks.photo_learners import Part, Split
from training.presets import PRESETS


def test_the_digits_are_those_of_the_default() -> None:
    setting, preset = SETTINGS["digits"], PRESETS["digits"]
    assert (setting.buffer, setting.hidden, setting.padded) == (
        preset.buffer, preset.network.hidden, preset.network.padded,
    )  # fmt: skip
    assert setting.image == preset.image
    data = alternative_data.read(setting, None, None)
    # What the report of the default says: 361 test images of known digits and 89 of unknown ones.
    assert (len(data.class_ids), {name: len(images) for name, images in data.foreign.items()}) == (361, {"8, 9": 89})
    assert set(data.class_ids) == set(data.train.targets) == set(range(8))
    assert data.test.shape[1:] == (1, 16, 16)
    part = alternative_data.part_for_choices(setting, data)
    assert (len(part.train), len(part.class_ids)) == (8 * 80, 8 * 30)


@pytest.mark.parametrize("kind", LEARNERS, ids=lambda kind: kind.name)
def test_a_learner_is_measured_with_the_time_of_its_own_answer(
    kind: type[photo_learners.FeatureLearner], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.benchmarks.feature_learners.RanPac.WIDTH", 100)
    random = np.random.default_rng(0)
    ids = np.repeat(np.arange(4), 25)
    encoded = random.normal(size=(4, 16))[ids] + 0.3 * random.normal(size=(100, 16))
    part = Part((encoded / np.linalg.norm(encoded, axis=1, keepdims=True)).astype(np.float32), ids)
    figures = photo_learners.measure(kind, Split(part, part, [range(2), range(2, 4)]), seed=0)
    assert figures["CIL %"] > 40 if "sequence" in kind.name else figures["CIL %"] > 90
    assert 0 < figures["own ms"] < 1000
    shown = photo_learners.table("a title", {kind.name: [figures]})
    assert {"own ms", "memory, MB"} <= {str(column.header) for column in shown.columns}
