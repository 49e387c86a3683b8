"""Scores and decisions on numbers that can be checked by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from models.scores import DECISIONS, INGREDIENTS, LEAST_SPREAD, PARTS, TINY, Decision, TaskScorer, standardise, weigh

LOGITS = [[math.log(1), math.log(3)], [math.log(2), math.log(2)]]
SAID = {
    "logits": torch.tensor(LOGITS),
    "tied": torch.tensor([[1.0, math.e], [0.0, math.e**2]]),
    "shallow": torch.tensor([[5.0, 6.0], [7.0, 8.0]]),
    "deep": torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
    "background": torch.tensor([[0.5, 0.5], [1.0, 1.0]]),
    "residual": torch.tensor([[10.0, 10.0], [20.0, 20.0]]),
}
BY_HAND = {
    "max_logit": [[0.0, -math.log(3)], [-math.log(2), -math.log(2)]],
    "max_softmax": [[-0.25, -0.75], [-0.5, -0.5]],
    "energy": [[-math.log(4)], [-math.log(4)]],
    "mahalanobis": [[0.0, 1.0], [math.log(TINY), 2.0]],
    "relative": [[0.5, math.e - 0.5], [-1.0, math.e**2 - 1]],
    "vim": [[10 - math.log(4)], [20 - math.log(4)]],
    "shallow": [[5.0, 6.0], [7.0, 8.0]],
    "deep": [[1.0, 2.0], [3.0, 4.0]],
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_by_hand(name: str) -> None:
    torch.testing.assert_close(PARTS[name].of(SAID), torch.tensor(BY_HAND[name]))


@pytest.mark.parametrize("name", PARTS)
def test_a_part_reads_what_it_says_and_nothing_else(name: str) -> None:
    part = PARTS[name]
    torch.testing.assert_close(part.of({key: SAID[key] for key in part.needs}), torch.tensor(BY_HAND[name]))


def test_a_decision_needs_the_ingredients_of_its_parts_and_the_logits() -> None:
    assert DECISIONS["features"].needs == ("logits", "shallow", "deep")
    assert DECISIONS["relative"].needs == ("logits", "tied", "background")
    assert DECISIONS["paper"].needs == ("logits",)
    assert all(set(decision.needs) <= set(INGREDIENTS) for decision in DECISIONS.values())


def test_distances_are_the_weighted_sum_of_the_parts_on_calibrated_logits() -> None:
    decision = Decision(("deep", "energy"))
    scorer = TaskScorer(decision, 2, scale=2.0, shift=0.5, weights=(3.0, 10.0), bias=-1.0)
    logits = torch.tensor([[0.5, 2 * math.log(3) + 0.5], [2 * math.log(2) + 0.5] * 2])
    torch.testing.assert_close(scorer.logits(SAID), logits)
    # exp(0.5) times 1 + 9, and times 4 + 4.
    energies = [-0.5 - math.log(10), -0.5 - math.log(8)]
    wanted = torch.tensor([[3 * deep + 10 * energies[row] - 1 for deep in SAID["deep"][row]] for row in range(2)])
    torch.testing.assert_close(scorer.distances(SAID), wanted)
    torch.testing.assert_close(scorer.scores(SAID), wanted.amin(dim=1).double())


def test_what_is_said_of_a_task_is_said_of_each_of_its_classes() -> None:
    scorer = TaskScorer(DECISIONS["energy"], 2, scale=1.0, shift=0.0, weights=(1.0,), bias=0.25)
    torch.testing.assert_close(scorer.distances(SAID), torch.full((2, 2), 0.25 - math.log(4)))


def memory_of(deep: list[float], shallow: list[float]) -> dict[str, Tensor]:
    """One class, and logits of zero."""
    zeros = torch.zeros(len(deep), 1)
    return {**dict.fromkeys(INGREDIENTS, zeros), "deep": torch.tensor([deep]).T, "shallow": torch.tensor([shallow]).T}


def test_one_score_is_standardised_to_median_zero_and_spread_one() -> None:
    # Their mean is 4, their median 2.
    deep = [0.0, 2.0, 2.0, 12.0, 4.0]
    memory = memory_of(deep, [0.0] * 5)
    deviation = math.sqrt((16 + 4 + 4 + 64 + 0) / 5)
    scorer = standardise(DECISIONS["deep"], memory, 1.0, 0.0)
    assert scorer.weights == pytest.approx((1 / deviation,))
    wanted = [(value - 2) / deviation for value in deep]
    assert scorer.scores(memory).tolist() == pytest.approx(wanted)


def test_parts_count_alike_whatever_their_units() -> None:
    deep, shallow = [1.0, 2.0, 3.0, 6.0], [500.0, 100.0, 300.0, 300.0]
    memory = memory_of(deep, shallow)
    scorer = standardise(DECISIONS["features"], memory, 1.0, 0.0)
    each = [torch.tensor(values, dtype=torch.float64) for values in (shallow, deep)]
    total = sum((values - values.mean()) / values.std(correction=0) for values in each)
    assert isinstance(total, Tensor)
    # torch's median of an even number is the lower one of the two in the middle.
    wanted = (total - total.sort().values[1]) / total.std(correction=0)
    assert scorer.scores(memory).tolist() == pytest.approx(wanted.tolist())
    in_other_units = standardise(DECISIONS["features"], memory_of(deep, [value / 7 for value in shallow]), 1.0, 0.0)
    other = memory_of(deep, [value / 7 for value in shallow])
    assert in_other_units.scores(other).tolist() == pytest.approx(wanted.tolist(), abs=1e-5)


def test_a_class_counts_by_its_nearest_and_calibration_goes_before() -> None:
    memory = {**SAID, "logits": torch.tensor([[0.0, 1.0], [3.0, 2.0], [4.0, 9.0]])}
    scorer = standardise(DECISIONS["max_logit"], memory, 2.0, -1.0)
    nearest = torch.tensor([-1.0, -5.0, -17.0], dtype=torch.float64)
    wanted = (nearest + 5) / nearest.std(correction=0)
    assert scorer.scores(memory).tolist() == pytest.approx(wanted.tolist())


def test_scores_that_are_all_the_same_stay_finite() -> None:
    memory = memory_of([3.0] * 4, [1.0] * 4)
    scorer = standardise(DECISIONS["features"], memory, 1.0, 0.0)
    assert scorer.scores(memory).isfinite().all()
    assert all(math.isfinite(weight) and weight <= 1 / LEAST_SPREAD**2 for weight in scorer.weights)


@pytest.mark.parametrize(("name", "scale", "shift"), [("paper", 1.0, 0.0), ("paper+c", 2.0, -1.0)])
def test_the_papers_decision_compares_scores_as_they_are(name: str, scale: float, shift: float) -> None:
    scorer = standardise(DECISIONS[name], SAID, 2.0, -1.0)
    assert (scorer.scale, scorer.shift, scorer.weights, scorer.bias) == (scale, shift, (1.0,), 0.0)
    wanted = -torch.logsumexp(SAID["logits"].double() * scale + shift, dim=1)
    torch.testing.assert_close(scorer.scores(SAID), wanted)


def test_a_weighed_score_is_the_likelihood_ratio_of_two_gaussians() -> None:
    memory = memory_of([-1.0, 0.0, 1.0], [0.0] * 3)
    plain = standardise(DECISIONS["deep"], memory, 1.0, 0.0)
    spread = math.sqrt(2 / 3)
    turned = memory_of([3 * spread, 5 * spread], [0.0] * 2)
    weighed = weigh(plain, turned)
    # Turned images lie four spreads off, so foreign ones are taken to lie two off.
    for score in (-1.0, 0.0, 0.7, 3.0):
        own, foreign = -(score**2) / 2, -((score - 2) ** 2) / 2
        assert float(weighed.scores(memory_of([score * spread], [0.0]))) == pytest.approx(foreign - own)


def test_a_task_that_tells_nothing_apart_says_little_for_or_against_itself() -> None:
    memory = memory_of([-1.0, 0.0, 1.0], [0.0] * 3)
    plain = standardise(DECISIONS["deep"], memory, 1.0, 0.0)
    far = memory_of([30.0], [0.0])
    assert float(plain.scores(far)) > 30
    for turned in (memory, memory_of([-9.0], [0.0])):
        assert abs(float(weigh(plain, turned).scores(far))) < 4
        assert float(weigh(plain, turned).scores(far)) > float(weigh(plain, turned).scores(memory).max())


def test_the_papers_scores_are_not_weighed() -> None:
    plain = standardise(DECISIONS["paper"], SAID, 2.0, -1.0)
    assert weigh(plain, SAID) == plain
