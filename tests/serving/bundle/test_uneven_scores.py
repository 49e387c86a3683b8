"""Scores of a task whose classes have very different numbers of images: the classes count equally."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from pydantic import ValidationError

from serving.bundle.decision import Rule, TaskRule, judge
from serving.bundle.own_scores import OwnScores

ALPHA = 0.05


def test_a_p_value_is_the_mean_of_those_among_each_class() -> None:
    scores, classes = np.array([1.0, 2.0, 3.0, 4.0, 5.0]), np.array([0, 0, 0, 0, 1])
    task = TaskRule.fit(scores, 2, local_classes=classes)
    for score, of_first, of_second in ((1.0, 5 / 5, 2 / 2), (3.0, 3 / 5, 2 / 2), (5.0, 1 / 5, 2 / 2)):
        expected = (of_first + of_second) / 2
        assert 10 ** -task.surprise(np.array([score]))[0] == pytest.approx(expected)
    assert task.least_p_value == pytest.approx((1 / 5 + 1 / 2) / 2)
    assert (task.images, task.own_counts) == (5, (1, 1, 1, 1, 1))
    # One image of the rare class counts as much as two and a half of the others, and so the median is higher than 3.
    assert task.center == 4.0


def test_classes_of_one_size_are_ranked_as_if_they_were_one_but_for_the_image_itself() -> None:
    scores = np.random.default_rng(0).normal(size=400)
    even = TaskRule.fit(scores, 2, local_classes=np.arange(400) % 2)
    every = TaskRule.fit(scores, 2)
    at = np.linspace(-3, 3, 50)
    assert 10 ** -even.surprise(at) == pytest.approx(10 ** -every.surprise(at), abs=0.01)


def drawn(generator: np.random.Generator, many: int, few: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Scores and classes: those of the rare class are larger and broader, as those of a class learned from few."""
    classes = np.repeat([0, 1], [many, few])
    return np.where(classes == 0, 1.0, 2.0) * generator.exponential(size=many + few) + classes, classes


@pytest.mark.parametrize("few", [12, 30])
def test_images_of_uneven_classes_are_accepted_as_promised_if_classes_count_equally(few: int) -> None:
    """The mean over the classes of the share that is accepted: promised where classes count equally, and only there."""
    generator = np.random.default_rng(few)
    tested, of_class = drawn(generator, 500, 500)
    accepted = {True: list[float](), False: list[float]()}
    for _ in range(300):
        scores, classes = drawn(generator, 120, few)
        for equally, shares in accepted.items():
            task = TaskRule.fit(scores, 1, local_classes=classes if equally else None)
            known = judge({"logits": tested[:, None], "distances": tested[:, None]}, Rule(tasks=(task,))).known
            shares.append(float(np.mean([known[of_class == each].mean() for each in (0, 1)])))
    assert np.mean(accepted[True]) >= 1 - ALPHA
    assert np.mean(accepted[False]) < 0.92


def test_a_bundle_needs_one_weight_per_score_or_none() -> None:
    with pytest.raises(ValidationError, match="own_weights has 1 entries, own_scores 2: one weight for each"):
        OwnScores(own_scores=(1.0, 2.0), own_counts=(1, 1), own_weights=(1.0,), tail=1.0)
    before = OwnScores.rank([1.0, 2.0]).model_dump()
    assert before.pop("own_weights") == ()
    assert OwnScores(**before) == OwnScores.rank([1.0, 2.0])
