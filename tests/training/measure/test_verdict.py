"""The verdict on a run: on literal numbers, and on outputs of runs that work and that do not."""

from __future__ import annotations

import numpy as np
import pytest

from serving.bundle.decision import NETWORK_NAMES, Outputs, Rule, TaskRule, judge
from serving.bundle.old_classes import lower_share
from serving.bundle.run_verdict import PARTS, RunVerdict
from training.measure.verdict import (
    LATER,
    LEFT_OUT,
    Hits,
    Separation,
    auroc_error,
    class_hits,
    judge_run,
    left_out,
    never_learned,
    not_yet_learned,
    task_hits,
)

RULE = Rule(alpha=0.05, tasks=tuple(TaskRule.fit(np.arange(200) / 40, classes=2) for _ in range(4)))
PER_CLASS = 20
CLASS_IDS = np.repeat(np.arange(8), PER_CLASS)


def outputs(distance: float, spread: float, seed: int = 0) -> Outputs:
    """Outputs for PER_CLASS images of each class: own columns around 0, those of other tasks around `distance`."""
    generator = np.random.default_rng(seed)
    own = np.arange(8) == CLASS_IDS[:, None]
    logits = generator.normal(0, spread, own.shape) + distance * own
    foreign = np.arange(8) // 2 != CLASS_IDS[:, None] // 2
    distances = np.abs(generator.normal(0, spread, own.shape)) + distance * foreign
    return dict(zip(NETWORK_NAMES, (logits, distances), strict=True))


def verdict_on(network: Outputs, unknown: Outputs | None = None) -> RunVerdict:
    verdicts = judge(network, RULE)
    found = left_out(network, RULE, CLASS_IDS) if unknown is None else never_learned(verdicts, judge(unknown, RULE))
    return judge_run(class_hits(verdicts, RULE, CLASS_IDS), task_hits(verdicts, RULE, CLASS_IDS), found, RULE)


def foreign_outputs(distance: float) -> Outputs:
    """Images of no class, at this distance from every class."""
    generator = np.random.default_rng(1)
    return {name: distance + generator.normal(0, 1, (40, 8)) for name in NETWORK_NAMES}


@pytest.mark.parametrize(
    ("right", "images", "guess", "grade"),
    [
        (361, 361, 0.25, "good"),
        (99, 100, 0.5, "good"),
        (90, 100, 0.5, "good"),
        (89, 100, 0.5, "weak"),
        (57, 100, 0.2, "weak"),
        # A fifth of the way from guessing to perfection is too little, however many images show it.
        (3601, 10_000, 0.2, "weak"),
        (3599, 10_000, 0.2, "not working"),
        (25, 100, 0.25, "not working"),
        (0, 100, 0.25, "not working"),
        # The same share, with too few images to exclude guessing.
        (14, 20, 0.5, "not working"),
        (140, 200, 0.5, "weak"),
        # A perfect result of few images is not good yet.
        (5, 5, 0.5, "weak"),
        (12, 12, 0.5, "good"),
        # Even a perfect result would prove nothing, or nothing is to be decided.
        (4, 4, 0.5, "not measured"),
        (0, 3, 0.5, "not measured"),
        (7, 7, 1.0, "not measured"),
    ],
)
def test_grades_of_accuracies(right: int, images: int, guess: float, grade: str) -> None:
    assert Hits(right, images, guess).grade == grade


@pytest.mark.parametrize(("right", "images"), [(5, 5), (12, 20), (0, 9), (90, 100), (9_000, 10_000)])
def test_a_confidence_interval_ends_where_so_many_hits_become_rare(right: int, images: int) -> None:
    """With the share at the lower end, as many hits or more have a probability of about 5 %."""
    lower = lower_share(right, images)
    assert 0 <= lower < max(right / images, 1e-9)
    drawn = np.random.default_rng(0).binomial(images, lower, 100_000)
    assert right == 0 or (drawn >= right).mean() <= 0.055


@pytest.mark.parametrize("area", [0.6, 0.9, 0.98])
def test_the_error_of_an_auroc_is_that_of_a_simulation(area: float) -> None:
    generator = np.random.default_rng(0)
    # Exponential scores, for which the formula is exact: P(unknown > known) = rate / (1 + rate).
    known = generator.exponential(1.0, (2000, 60))
    unknown = generator.exponential(area / (1 - area), (2000, 30))
    drawn = (unknown[:, :, None] > known[:, None, :]).mean(axis=(1, 2))
    assert drawn.mean() == pytest.approx(area, abs=0.01)
    assert auroc_error(area, 60, 30) == pytest.approx(drawn.std(), rel=0.15)


def test_a_perfect_auroc_of_few_images_is_uncertain() -> None:
    assert auroc_error(1.0, 20, 3) > auroc_error(1.0, 200, 30) > 0
    assert Separation(1.0, 20, 3, 0.05, 1.0).grade(0.05) == "weak"
    assert Separation(1.0, 200, 30, 0.05, 1.0).grade(0.05) == "good"


@pytest.mark.parametrize(
    ("auroc", "rejected_known", "rejected_unknown", "grade"),
    [
        (0.99, 0.05, 0.93, "good"),
        (0.90, 0.05, 0.50, "good"),
        (0.89, 0.05, 0.50, "weak"),
        # Good scores with a threshold that is too high, or too low.
        (0.93, 0.00, 0.08, "weak"),
        (0.99, 0.16, 0.99, "weak"),
        (0.70, 0.05, 0.20, "weak"),
        (0.59, 0.05, 0.20, "not working"),
        (0.47, 0.05, 0.06, "not working"),
        # A threshold by which known images are rejected as often as unknown ones decides nothing.
        (0.93, 0.05, 0.05, "not working"),
        (0.93, 0.00, 0.00, "not working"),
    ],
)
def test_grades_of_unknown_detection(auroc: float, rejected_known: float, rejected_unknown: float, grade: str) -> None:
    assert Separation(auroc, 1000, 1000, rejected_known, rejected_unknown).grade(0.05) == grade


def test_a_weak_auroc_of_few_images_cannot_be_distinguished_from_guessing() -> None:
    assert Separation(0.65, 1000, 1000, 0.05, 0.2).grade(0.05) == "weak"
    assert Separation(0.65, 30, 10, 0.05, 0.2).grade(0.05) == "not working"


def test_a_run_that_works_is_good_in_every_part() -> None:
    verdict = verdict_on(outputs(40, 0.3), foreign_outputs(40))
    assert [part.grade for part in verdict.parts.values()] == ["good"] * 3
    assert verdict.warning is None
    assert all(part.advice == "" for part in verdict.parts.values())
    assert "TP 100.0 % of 160 test images, guessing 25.0 %" in verdict.summary
    assert "WP 100.0 % of 160 test images, guessing 50.0 %" in verdict.summary
    assert "AUROC 1.000, guessing 0.5; 100.0 % of unknown images rejected" in verdict.summary
    for title in PARTS.values():
        assert f"{title}: good" in verdict.summary.lower()


def test_a_run_that_guesses_does_not_work_in_any_part() -> None:
    verdict = verdict_on(outputs(0, 2), foreign_outputs(1))
    assert [part.grade for part in verdict.parts.values()] == ["not working"] * 3
    assert verdict.warning is not None
    for title, part in verdict.parts.items():
        assert f"{title} ({part.numbers})" in verdict.warning
        assert part.advice
        assert part.advice in verdict.summary


def test_without_unknown_images_every_task_is_left_out_in_turn() -> None:
    network = outputs(40, 0.3)
    found = left_out(network, RULE, CLASS_IDS)
    assert found is not None
    assert (found.auroc, found.rejected_unknown, found.source) == (1.0, 1.0, LEFT_OUT)
    assert (found.known, found.unknown) == (160, 40)
    assert verdict_on(network).unknown.grade == "good"
    # Images that are as near to the other tasks as to their own are known to the run without their own.
    assert verdict_on(outputs(0.5, 1)).unknown.grade == "not working"


def test_images_of_a_task_are_unknown_to_the_run_before_it() -> None:
    """Statistics of today have seen all tasks, so what they make of a task's images proves nothing."""

    def before(count: int) -> Outputs:
        # Until the last task was learned, its images looked like those of the task before it.
        moved = np.where(CLASS_IDS // 2 == 3, CLASS_IDS - 2, CLASS_IDS) if count == 3 else CLASS_IDS
        foreign = np.arange(2 * count) // 2 != moved[:, None] // 2
        distances = 40.0 * foreign + np.random.default_rng(0).normal(0, 0.01, foreign.shape) ** 2
        return dict(zip(NETWORK_NAMES, (-distances, distances), strict=True))

    found = not_yet_learned(RULE, CLASS_IDS, before)
    assert found is not None
    assert found.source == LATER
    assert found.auroc == pytest.approx((1 + 1 + 0.5) / 3, abs=0.05)
    assert found.rejected_unknown == pytest.approx(2 / 3, abs=0.05)
    assert (found.known, found.unknown) == (40, 40), "those of the task with the fewest"
    left = left_out(outputs(40, 0.3), RULE, CLASS_IDS)
    assert left is not None
    assert left.auroc == 1


def test_a_run_that_could_reject_nothing_before_a_task_is_left_out() -> None:
    few = TaskRule.fit(np.arange(18) / 4, classes=2)
    rule = Rule(alpha=0.05, tasks=(few, few, *RULE.tasks[2:]))
    network = outputs(40, 0.3)
    assert not_yet_learned(rule, CLASS_IDS, lambda count: network) is None
    rule = Rule(alpha=0.05, tasks=(*RULE.tasks[:3], few))
    found = not_yet_learned(rule, CLASS_IDS, lambda count: network)
    assert found is not None
    assert found.rejected_unknown == 1


def test_the_run_before_a_task_is_not_measured_without_images_of_later_tasks() -> None:
    first = CLASS_IDS[CLASS_IDS < 2]
    assert not_yet_learned(RULE, first, lambda count: pytest.fail("nothing to measure")) is None


def test_a_single_task_without_unknown_images_is_not_measured() -> None:
    rule = Rule(alpha=0.05, tasks=RULE.tasks[:1])
    network = {name: values[:, :2] for name, values in outputs(40, 0.3).items()}
    class_ids = CLASS_IDS[:40]
    network = {name: values[:40] for name, values in network.items()}
    assert left_out(network, rule, class_ids) is None
    verdicts = judge(network, rule)
    verdict = judge_run(class_hits(verdicts, rule, class_ids), task_hits(verdicts, rule, class_ids), None, rule)
    assert [part.grade for part in verdict.parts.values()] == ["good", "not measured", "not measured"]
    assert "--unknown" in verdict.unknown.advice
    assert verdict.warning is None


def test_one_class_per_task_leaves_nothing_to_decide_within_it() -> None:
    rule = Rule(alpha=0.05, tasks=tuple(TaskRule.fit(np.arange(200) / 40, classes=1) for _ in range(8)))
    verdicts = judge(outputs(40, 0.3), rule)
    assert class_hits(verdicts, rule, CLASS_IDS).grade == "not measured"
    assert task_hits(verdicts, rule, CLASS_IDS).guess == 1 / 8


def test_guessing_knows_how_frequent_classes_and_tasks_are() -> None:
    chosen = np.concatenate([np.arange(20), np.arange(20, 25), np.arange(40, 45)])
    network = {name: values[chosen] for name, values in outputs(40, 0.3).items()}
    verdicts, ids = judge(network, RULE), CLASS_IDS[chosen]
    assert class_hits(verdicts, RULE, ids).guess == (20 + 5) / 30
    assert task_hits(verdicts, RULE, ids).guess == 25 / 30


def test_a_run_with_too_few_images_to_reject_any_is_found_out() -> None:
    few = Rule(alpha=0.05, tasks=(*RULE.tasks[:3], TaskRule.fit(np.arange(15) / 3, classes=2)))
    network = outputs(40, 0.3)
    verdicts = judge(network, few)
    found = never_learned(verdicts, judge(foreign_outputs(40), few))
    verdict = judge_run(class_hits(verdicts, few, CLASS_IDS), task_hits(verdicts, few, CLASS_IDS), found, few)
    assert [part.grade for part in verdict.parts.values()] == ["good", "good", "not working"]
    assert "task 3 has fewer than 20 images" in verdict.unknown.advice
    assert found.auroc > 0.9


def pooled_verdict(images: int, least_photos: int) -> RunVerdict:
    """Of two tasks of a run with a trunk, which counts the `images` of both together."""
    scores = np.arange(images // 2) / images
    tasks = tuple(TaskRule.fit(scores, 2, scores, scores) for _ in range(2))
    rule = Rule(score="pooled", alpha=0.05, tasks=tasks, joint=True, expectation=True)
    ids = CLASS_IDS[:80]
    network = {name: values[:80, :4] for name, values in outputs(0, 2).items()}
    verdicts = judge(network, rule)
    found = never_learned(verdicts, judge({name: values[:, :4] for name, values in foreign_outputs(1).items()}, rule))
    return judge_run(class_hits(verdicts, rule, ids), task_hits(verdicts, rule, ids), found, rule, least_photos)


def test_with_a_trunk_the_advice_is_what_helps_a_trunk() -> None:
    verdict = pooled_verdict(200, 50)
    assert [part.grade for part in verdict.parts.values()] == ["not working"] * 3
    for part in verdict.parts.values():
        assert "ore photos per class, another --trunk" in part.advice
        assert "--size" in part.advice
    assert "onger training" not in verdict.summary
    assert "larger network" not in verdict.summary
    assert "Half of the classes" not in verdict.summary


@pytest.mark.parametrize(
    ("photos", "said"), [(1, "from 1 photo or"), (5, "from 5 photos or"), (20, "from 20 photos or")]
)
def test_few_photos_per_class_have_a_sentence_on_what_to_expect(photos: int, said: str) -> None:
    verdict = pooled_verdict(200, photos)
    assert said in verdict.note
    assert "about half of unknown photos to pass as known" in verdict.note
    assert verdict.note in verdict.summary
    assert pooled_verdict(200, 21).note == ""


def test_with_a_trunk_the_photos_of_all_tasks_count_together() -> None:
    # Each task has too few by itself.
    assert "fewer than 20" not in pooled_verdict(30, 8).summary
    few = pooled_verdict(16, 4).unknown.advice
    assert "all tasks together have fewer than 20 images" in few
    assert "task 0" not in few
