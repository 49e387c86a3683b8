"""Scores and decisions on numbers that can be checked by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from models.detectors import SCORES, Decision, decisions
from models.detectors.detector import UnknownDetector
from models.detectors.mahalanobis import TINY
from models.detectors.task_scorer import LEAST_EXCESS, LEAST_SPREAD, TaskScorer, standardise

LOGITS = [[math.log(1), math.log(3)], [math.log(2), math.log(2)]]
MEANS = {
    "logits": torch.tensor(LOGITS),
    "mahalanobis": torch.tensor([[1.0, math.e], [0.0, math.e**2]]),
    "shallow": torch.tensor([[5.0, 6.0, 9.0, 6.0], [7.0, 8.0, 8.0, 9.0]]),
    "deep": torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
    "relative": torch.tensor([[0.5], [1.0]]),
    "vim": torch.tensor([[10.0], [20.0]]),
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
"""Of two classes; in the shallow features, each has two components."""
DETECTOR = UnknownDetector(classes=2)


def fitted(name: str, own: dict[str, Tensor], scale: float = 1.0, shift: float = 0.0) -> TaskScorer:
    """A decision that is standardised on these measurements."""
    decision = decisions()[name]
    detector = UnknownDetector(own["logits"].shape[1])
    return standardise(decision, [detector.score(each) for each in decision.scores], own, scale, shift)


@pytest.mark.parametrize("name", BY_HAND)
def test_scores_by_hand_from_the_measurements_that_they_need(name: str) -> None:
    score = DETECTOR.score(name)
    torch.testing.assert_close(score.score({key: MEANS[key] for key in score.needs}), torch.tensor(BY_HAND[name]))


def test_every_score_is_checked_by_hand() -> None:
    assert set(BY_HAND) == set(SCORES)


def test_a_decision_needs_the_measurements_of_its_scores_and_the_logits() -> None:
    known = decisions()
    assert DETECTOR.needs(known["features"]) == ["logits", "shallow", "deep"]
    assert DETECTOR.needs(known["relative"]) == ["logits", "mahalanobis", "relative"]
    assert DETECTOR.needs(known["paper"]) == ["logits"]


def test_every_score_alone_is_a_decision() -> None:
    assert {name: decisions()[name] for name in SCORES} == {name: Decision((name,)) for name in SCORES}


def test_a_task_misses_the_scores_whose_measurements_it_does_not_have() -> None:
    detector = UnknownDetector(classes=2)
    assert detector.missing(decisions()["fused"]) == ["shallow", "deep", "energy"]
    own = {name: MEANS[name] for name in ("logits", "deep", "relative")}
    detector.remember(own)
    assert detector.missing(decisions()["fused"]) == ["shallow"]
    assert detector.missing(decisions()["relative+energy"]) == ["relative"]
    assert detector.missing(decisions()["vim"]) == ["vim"]
    assert detector.missing(decisions()["paper"]) == []


def test_distances_are_the_weighted_sum_of_the_scores_of_calibrated_logits() -> None:
    scores = (DETECTOR.score("deep"), DETECTOR.score("energy"))
    weights = ((3.0, 4.0), (10.0, 20.0))
    scorer = TaskScorer(Decision(("deep", "energy")), scores, scale=2.0, shift=0.5, weights=weights, bias=(-1.0, -2.0))
    logits = torch.tensor([[0.5, 2 * math.log(3) + 0.5], [2 * math.log(2) + 0.5] * 2])
    torch.testing.assert_close(scorer.logits(MEANS), logits)
    # exp(0.5) times 1 + 9, and times 4 + 4.
    energies = [-0.5 - math.log(10), -0.5 - math.log(8)]
    deep = MEANS["deep"].tolist()
    wanted = torch.tensor(
        [[3 * deep[row][0] + 10 * energies[row] - 1, 4 * deep[row][1] + 20 * energies[row] - 2] for row in range(2)]
    )
    torch.testing.assert_close(scorer.distances(MEANS), wanted)
    torch.testing.assert_close(scorer.task_scores(MEANS), wanted.amin(dim=1).double())


def test_the_score_of_a_task_is_that_of_each_of_its_classes() -> None:
    energy = (DETECTOR.score("energy"),)
    scorer = TaskScorer(Decision(("energy",)), energy, scale=1.0, shift=0.0, weights=((1.0, 1.0),), bias=(0.25, 0.25))
    torch.testing.assert_close(scorer.distances(MEANS), torch.full((2, 2), 0.25 - math.log(4)))


def memory_of(deep: list[float], shallow: list[float]) -> dict[str, Tensor]:
    """One class, and logits of zero."""
    columns = {"logits": [0.0] * len(deep), "deep": deep, "shallow": shallow}
    return {name: torch.tensor([values]).T.contiguous() for name, values in columns.items()}


def test_one_score_is_standardised_to_median_zero_and_a_mean_excess_of_one() -> None:
    # Their median is 2; what is above it exceeds it by 10 and 2.
    deep = [0.0, 2.0, 2.0, 12.0, 4.0]
    memory = memory_of(deep, [0.0] * 5)
    scorer = fitted("deep", memory)
    assert scorer.weights[0] == pytest.approx((1 / 6,))
    assert scorer.task_scores(memory).tolist() == pytest.approx([(value - 2) / 6 for value in deep])


def test_scores_count_alike_whatever_their_units() -> None:
    deep, shallow = [1.0, 2.0, 3.0, 6.0], [500.0, 100.0, 300.0, 300.0]
    memory = memory_of(deep, shallow)
    scorer = fitted("features", memory)
    each = [torch.tensor(values, dtype=torch.float64) for values in (shallow, deep)]
    total = sum((values - values.mean()) / values.std(correction=0) for values in each)
    assert isinstance(total, Tensor)
    # torch's median of an even number is the lower one of the two in the middle.
    median = total.sort().values[1]
    wanted = (total - median) / (total[total > median] - median).mean()
    assert scorer.task_scores(memory).tolist() == pytest.approx(wanted.tolist())
    other = memory_of(deep, [value / 7 for value in shallow])
    assert fitted("features", other).task_scores(other).tolist() == pytest.approx(wanted.tolist(), abs=1e-5)


def test_a_task_counts_by_its_nearest_class_after_calibration() -> None:
    memory = {**MEANS, "logits": torch.tensor([[0.0, 1.0], [3.0, 2.0], [4.0, 9.0]])}
    scorer = fitted("max_logit", memory, 2.0, -1.0)
    nearest = torch.tensor([-1.0, -5.0, -17.0], dtype=torch.float64)
    wanted = (nearest + 5) / 4
    assert scorer.task_scores(memory).tolist() == pytest.approx(wanted.tolist())


def test_scores_that_are_all_the_same_stay_finite() -> None:
    memory = memory_of([3.0] * 4, [1.0] * 4)
    scorer = fitted("features", memory)
    assert scorer.task_scores(memory).isfinite().all()
    assert all(
        math.isfinite(weight) and weight <= 1 / (LEAST_SPREAD * LEAST_EXCESS)
        for weights in scorer.weights
        for weight in weights
    )


def test_uneven_classes_are_standardised_each_by_its_own_images() -> None:
    """Forty images of a class with small distances, and forty of one with large ones: with one deviation for all, an
    image that is usual for the second class would be far from it."""
    torch.manual_seed(0)
    classes = torch.arange(2).repeat_interleave(40)
    deep = torch.full((80, 2), 1000.0)
    deep[:40, 0] = 1 + 0.1 * torch.rand(40)
    deep[40:, 1] = 50 + 10 * torch.rand(40)
    own = {"logits": torch.zeros(80, 2), "deep": deep}
    decision, scores = decisions()["deep"], [DETECTOR.score("deep")]
    together, apart = (standardise(decision, scores, own, 1.0, 0.0, each) for each in (None, classes))
    medians = [
        [float(scorer.task_scores(own)[classes == number].median()) for number in range(2)]
        for scorer in (together, apart)
    ]
    assert medians[0][1] - medians[0][0] > 1
    assert abs(medians[1][1] - medians[1][0]) < 0.5
    assert together.weights[0][0] == together.weights[0][1]
    # The variance of all counts as ten images, so that the small class is not blown up to the full.
    pooled = float(deep.amin(dim=1).var(correction=0))
    wanted = [math.sqrt((40 * float(deep[classes == c, c].var(correction=0)) + 10 * pooled) / 50) for c in range(2)]
    assert apart.weights[0][0] / apart.weights[0][1] == pytest.approx(wanted[1] / wanted[0], rel=1e-4)


@pytest.mark.parametrize(("name", "scale", "shift"), [("paper", 1.0, 0.0), ("paper+c", 2.0, -1.0)])
def test_the_papers_decision_compares_scores_as_they_are(name: str, scale: float, shift: float) -> None:
    scorer = fitted(name, MEANS, 2.0, -1.0)
    assert (scorer.scale, scorer.shift, scorer.weights, scorer.bias) == (scale, shift, ((1.0, 1.0),), (0.0, 0.0))
    wanted = -torch.logsumexp(MEANS["logits"].double() * scale + shift, dim=1)
    torch.testing.assert_close(scorer.task_scores(MEANS), wanted)


def test_the_memory_of_a_task_has_its_validation_images_first() -> None:
    detector = UnknownDetector(classes=1)
    detector.remember(memory_of([1.0], [2.0]), memory_of([3.0, 4.0], [5.0, 6.0]))
    assert detector.memory()["deep"].flatten().tolist() == [1.0, 3.0, 4.0]
    assert detector.own.means()["deep"].tolist() == [[1.0]]
    alone = UnknownDetector(classes=1)
    alone.remember(memory_of([1.0], [2.0]))
    assert alone.memory()["deep"].tolist() == [[1.0]]
