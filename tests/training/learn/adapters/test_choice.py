"""Adapters are used if they know something that statistics do not, and only then."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from training.learn.adapters.choice import Candidate, Choice, JudgedAdapters, candidates, choose, judge

Array = NDArray[np.float64]
COLUMNS = [slice(0, 3), slice(3, 6)]
IMAGES = 120


def logits_for(classes: NDArray[np.int64], certainty: float, seed: int, count: int = 3) -> Array:
    """Noisy logits that favour the true class by so much."""
    noise: Array = np.random.default_rng(seed).normal(size=(len(classes), count))
    noise[np.arange(len(classes)), classes] += certainty
    return noise


def judged_with(own: dict[int, Array], pooled_certainty: float = 2.0) -> JudgedAdapters:
    """The second of two tasks with three classes each; the adapter of the first one knows nothing."""
    classes = np.arange(IMAGES) % 3
    pooled = logits_for(classes + 3, pooled_certainty, 0, 6)
    nothing = np.zeros((IMAGES, 3))
    return judge(pooled, COLUMNS, {count: [nothing, each] for count, each in own.items()}, classes)


def choice_with(own: dict[int, Array], pooled_certainty: float = 2.0) -> Choice:
    return choose([judged_with(own, pooled_certainty)], max(own))


def classes() -> NDArray[np.int64]:
    return np.arange(IMAGES) % 3


def test_an_adapter_that_knows_more_is_used_and_sharpens_its_task() -> None:
    good = logits_for(classes(), 2.5, 1)
    choice = choice_with({1: good, 4: good})
    assert choice.weight > 0
    assert choice.rotations == 1, "four rotations that say the same are not worth their price"
    assert choice.with_adapters.wp > choice.alone.wp
    assert choice.with_adapters.nats < choice.alone.nats
    assert choice.images == IMAGES


def test_an_adapter_that_guesses_is_not_used() -> None:
    noise = logits_for(classes(), 0.0, 1)
    choice = choice_with({1: noise, 4: noise})
    assert choice.weight == 0
    assert choice.rotations == 1
    assert choice.best.weight > 0, "the decision with adapters can still be asked for"


def test_an_adapter_that_repeats_the_statistics_is_not_used() -> None:
    """It could make them more certain, which statistics can do alone."""
    same = logits_for(classes() + 3, 2.0, 0, 6)[:, 3:]
    for factor in (0.2, 1.0, 5.0):
        assert choice_with({1: factor * same, 4: factor * same}).weight == 0


def test_rotations_are_read_if_they_put_many_more_photos_right() -> None:
    weak, strong = logits_for(classes(), 0.5, 1), logits_for(classes(), 6.0, 2)
    choice = choice_with({1: weak, 4: strong}, pooled_certainty=0.5)
    assert (choice.weight > 0, choice.rotations) == (True, 4)
    assert choice.best == Candidate(choice.weight, 4)


def test_the_choice_is_made_on_the_photos_of_all_tasks() -> None:
    good, bad = logits_for(classes(), 2.5, 1), logits_for((classes() + 1) % 3, 6.0, 3)
    one, other = judged_with({1: good, 4: good}), judged_with({1: bad, 4: bad})
    assert choose([one], 4).weight > 0
    assert choose([one, other, other], 4).weight == 0


def test_columns_are_what_their_candidates_predict() -> None:
    good = logits_for(classes(), 3.0, 1)
    found = judged_with({1: good, 4: good})
    every = candidates(4)
    assert every[0] == Candidate(0.0)
    assert found.nats.shape == found.wp.shape == (IMAGES, len(every))
    alone = every.index(Candidate(1.0, 1))
    assert np.array_equal(found.wp[:, alone], good.argmax(axis=1) == classes())
    # Statistics that are sharpened within a task find the same classes in it.
    for place, each in enumerate(every):
        if each.weight == 0:
            assert np.array_equal(found.wp[:, place], found.wp[:, 0])
    assert found.scales.shape == (2,)


def test_what_was_measured_is_stored_in_numbers() -> None:
    good = logits_for(classes(), 3.0, 1)
    found = judged_with({1: good, 4: good})
    again = JudgedAdapters.from_arrays(found.to_arrays())
    assert choose([again], 4) == choose([JudgedAdapters.from_arrays(again.to_arrays())], 4)
    np.testing.assert_allclose(again.nats, found.nats, rtol=1e-6)
    broken: dict[str, Any] = {**found.to_arrays(), "wp": found.wp[1:]}
    with pytest.raises(ValueError, match="other shapes"):
        JudgedAdapters.from_arrays(broken)


def test_a_network_without_rotations_has_one_kind_of_candidates() -> None:
    good = logits_for(classes(), 2.5, 1)
    assert {each.rotations for each in candidates(1)} == {1}
    assert choice_with({1: good}).weight > 0
