"""The drift tests: right under the null hypothesis, quick after a change, and what they say about it."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import pytest

from serving.telemetry.drift import EDGES, POWERS, Alarm, DriftEvidence, DriftMonitor, Reference, Watched, bets, wilson

Score = Callable[[random.Random], float]


def uniform(chance: random.Random) -> float:
    """The unknown score of an image whose p-value is uniform."""
    return -math.log10(1 - chance.random())


def few_values(chance: random.Random) -> float:
    """Many equal scores: ties must not matter."""
    return chance.choice((0.0, 0.0, 0.5, 3.0))


def monitor(seed: int, tasks: int = 2, every: int = 1_000) -> tuple[DriftMonitor, random.Random]:
    chance = random.Random(seed)
    clock = itertools.count(1000.0)
    return DriftMonitor(tasks, every, chance=chance.random, clock=lambda: next(clock)), chance


def show(watched: DriftMonitor, chance: random.Random, task: int, score: float, name: str = "x") -> Alarm | None:
    """An image of this unknown score, and of any brightness."""
    return watched.add(task, Watched(score, chance.gauss(100, 20)), name, name)


@pytest.mark.parametrize("score", [uniform, few_values])
def test_p_values_are_uniform_whatever_the_scores_are(score: Score) -> None:
    chance, reference = random.Random(0), Reference(EDGES[0])
    p_values = sorted(reference.p_value(score(chance), chance.random()) for _ in range(4000))
    worst = max(abs(p_value - (place + 0.5) / len(p_values)) for place, p_value in enumerate(p_values))
    # The Kolmogorov-Smirnov limit at 0.1 %.
    assert worst < 1.95 / math.sqrt(len(p_values))


def test_betting_functions_have_mean_one() -> None:
    steps = 200_000
    means = [0.0] * (2 * len(POWERS))
    for step in range(steps):
        for place, factor in enumerate(bets((step + 0.5) / steps)):
            means[place] += factor / steps
    assert means == pytest.approx([1.0] * len(means), abs=0.06)
    assert all(mean <= 1.0001 for mean in means)


def test_false_alarms_are_as_rare_as_promised() -> None:
    """100 streams of 1,000 images, at most one false alarm in 10,000 images on average."""
    alarms = 0
    for seed in range(100):
        watched, chance = monitor(seed, every=10_000)
        # Tasks come in any order and share, and a tenth of the images are unknown.
        for _ in range(1_000):
            score = uniform(chance) if chance.random() < 0.9 else 5.0 + chance.random()
            show(watched, chance, int(chance.random() < 0.3), score)
        alarms += len(watched.alarms)
    assert alarms <= 10


def test_the_sum_of_stakes_grows_by_one_per_image() -> None:
    """R_t - t is a martingale: its mean over many streams of uniform p-values is t."""
    chance, totals = random.Random(1), []
    for _ in range(4000):
        evidence = DriftEvidence()
        for _ in range(5):
            evidence.add([*bets(chance.random()), *bets(chance.random())], 0.0)
        totals.append(min(evidence.value, 1000.0))
    assert sum(totals) / len(totals) == pytest.approx(5.0, rel=0.25)


def test_a_change_of_one_task_is_named_with_its_time_and_examples() -> None:
    watched, chance = monitor(0, tasks=3, every=1_000_000)
    for number in range(1_500):
        assert show(watched, chance, number % 3, uniform(chance), f"old{number}") is None
    for number in range(1_500):
        changed = number % 3 == 1
        score = 1.5 + chance.random() if changed and chance.random() < 0.5 else uniform(chance)
        alarm = show(watched, chance, number % 3, score, f"new{number}")
        if alarm is not None:
            break
    assert alarm is not None
    assert (alarm.task, alarm.change) == ("1", "less familiar")
    assert 450 <= alarm.before <= 520
    assert alarm.images < 100
    # The clock ticks once per image.
    assert abs(alarm.since - (1000 + 1500)) < 60
    assert len(alarm.examples) == 6
    assert all(example.request_id is not None and example.request_id.startswith("new") for example in alarm.examples)
    assert min(example.unknown_score for example in alarm.examples) > 1.0


def test_images_that_become_more_familiar_are_a_change_too() -> None:
    watched, chance = monitor(0, tasks=1)
    for _ in range(1_000):
        show(watched, chance, 0, uniform(chance))
    raised = [alarm for _ in range(300) if (alarm := show(watched, chance, 0, 0.01 * chance.random())) is not None]
    assert raised[0].change == "more familiar"


def test_images_that_become_darker_are_a_change_although_they_are_as_familiar_as_before() -> None:
    watched, chance = monitor(0, every=1_000_000)
    for number in range(1_000):
        assert show(watched, chance, number % 2, uniform(chance)) is None
    for number in range(100):
        if alarm := watched.add(number % 2, Watched(uniform(chance), chance.gauss(67, 15)), "x"):
            break
    assert alarm is not None
    assert alarm.change == "darker"
    assert alarm.images < 60
    assert max(example.brightness for example in alarm.examples) < 67


def test_after_an_alarm_the_new_images_are_the_reference() -> None:
    watched, chance = monitor(0, tasks=1, every=100_000)
    for _ in range(500):
        show(watched, chance, 0, uniform(chance))
    for _ in range(2_000):
        show(watched, chance, 0, 2.0 + uniform(chance))
    assert len(watched.alarms) == 1
    assert watched.images["0"] > 1_900


def test_memory_does_not_grow() -> None:
    watched, chance = monitor(0, tasks=1, every=10**12)
    for _ in range(3_000):
        show(watched, chance, 0, uniform(chance))
    assert len(watched._recent) == 256
    assert [len(each._counts) for each in watched._references[0]] == [len(edges) + 1 for edges in EDGES]


def test_bins_cover_every_score_in_order() -> None:
    for edges in EDGES:
        assert list(edges) == sorted(set(edges))
        assert Reference(edges).p_value(-1.0, 0.5) == Reference(edges).p_value(1e9, 0.5) == 0.5


@pytest.mark.parametrize(
    ("count", "total", "low", "high"),
    [(0, 0, 0, 1), (0, 10, 0, 0.2775), (61, 1000, 0.0478, 0.0776), (10, 10, 0.7225, 1)],
)
def test_the_interval_of_a_share(count: int, total: int, low: float, high: float) -> None:
    assert wilson(count, total) == pytest.approx((low, high), abs=2e-4)
