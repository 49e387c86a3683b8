from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from serving.bundle.decision import NETWORK_NAMES, OUTPUT_NAMES, Rule, TaskRule, complete, decide, judge, threshold

TASK = TaskRule.fit([1.0, 2.0, 3.0, 4.0], classes=2)
RULE = Rule(score="max_logit", alpha=0.05, tasks=(TaskRule.fit([-4.0, -3.0, -2.0, -1.0], classes=2),) * 2)
LOGITS = np.array([[2.0, 0.0, 1.0, 1.0], [0.0, 4.0, -3.0, -9.0], [1.0, 1.0, 1.0, 1.0]])
OUTPUTS = {"logits": LOGITS, "distances": -LOGITS}


def surprise(task: TaskRule, score: float) -> float:
    return float(Rule(tasks=(task,)).surprise(np.array([[score]]))[0, 0])


@pytest.mark.parametrize(
    ("score", "p_value"),
    [
        (0.0, 1.0),
        (1.0, 1.0),
        (2.0, 0.8),
        # A tenth of the tail after a score nine tenths of its step are done; halfway there, half of that.
        (2.05, 0.71),
        (2.1, 0.62),
        (2.55, 0.61),
        (3.0, 0.6),
        (4.0, 0.4),
        # The median is 2.5, so the tail is the mean of 0.5 and 1.5.
        (4.1, 0.22),
        # Beyond it, p falls as an exponential distribution with that mean.
        (5.1, 0.22 / math.e),
        (104.1, 0.22 * math.exp(-100)),
    ],
)
def test_p_value_by_hand(score: float, p_value: float) -> None:
    assert 10 ** -surprise(TASK, score) == pytest.approx(p_value, rel=1e-12)


def test_tied_scores_count_each() -> None:
    task = TaskRule.fit([1.0, 2.0, 2.0, 2.0], classes=1)
    assert (task.own_counts, task.images) == ((1, 3), 4)
    assert 10 ** -surprise(task, 2.0) == pytest.approx(4 / 5)


def test_decision_by_hand() -> None:
    verdicts = judge(OUTPUTS, RULE)
    # Row 0: scores -2 and -1, so that one lies one further out; p-values 3/5 and 2/5.
    nearer = 1 / (1 + math.exp(-1.0))
    assert verdicts.p_task[0] == pytest.approx([nearer, 1 - nearer])
    within = 1 / (1 + math.exp(-2))
    assert verdicts.p_within_task[0] == pytest.approx([within, 1 - within, 0.5, 0.5])
    assert (verdicts.class_id[0], verdicts.task[0], verdicts.known[0]) == (0, 0, True)
    assert verdicts.p_value[0] == pytest.approx(0.6)
    assert verdicts.unknown_score[0] == pytest.approx(-math.log10(0.6))
    # Row 1: task 0 scores -4, the best of its own images; task 1 scores 3, which is 3.9 tails beyond its last step.
    assert verdicts.p_value[1] == pytest.approx(1.0)
    # Four images cannot reject at alpha 0.05, so its score stays below the threshold; without alpha it goes beyond.
    assert verdicts.task_unknown_score[1, 0] == 0
    assert -math.log10(0.2) < verdicts.task_unknown_score[1, 1] < threshold(0.05)
    assert surprise(RULE.tasks[1], 3.0) == pytest.approx(-math.log10(0.22) + 3.9 / math.log(10))
    assert (verdicts.class_id[1], verdicts.task[1]) == (1, 0)


def test_completed_outputs_hold_all_that_a_decision_reads() -> None:
    completed = complete(OUTPUTS, RULE)
    assert tuple(completed) == OUTPUT_NAMES
    assert (completed["scores"] == -LOGITS.reshape(3, 2, 2).max(axis=2)).all()
    # A decision reads neither logits nor distances: a graph may have computed the other outputs.
    completed |= dict.fromkeys(NETWORK_NAMES, np.full_like(LOGITS, np.nan))
    for one, other in zip(decide(completed, RULE), judge(OUTPUTS, RULE), strict=True):
        assert np.array_equal(one, other)


def test_a_tie_falls_to_the_first_class() -> None:
    verdicts = judge(OUTPUTS, RULE)
    assert (verdicts.class_id[2], verdicts.task[2]) == (0, 0)


def test_probability_is_the_product_exactly() -> None:
    verdicts = judge(OUTPUTS, RULE)
    expected = verdicts.p_within_task * np.repeat(verdicts.p_task, 2, axis=1)
    assert (verdicts.probability == expected).all()
    assert verdicts.probability.sum(axis=1) == pytest.approx([1, 1, 1])


def test_given_task_answers_within_it() -> None:
    verdicts = judge(OUTPUTS, RULE, given_task=1)
    assert verdicts.task.tolist() == [1, 1, 1]
    assert verdicts.class_id.tolist() == [2, 2, 2]
    assert verdicts.p_task.tolist() == [[0.0, 1.0]] * 3
    # Four images cannot show that a p-value is below 1/5, however far away an image is.
    assert verdicts.p_value == pytest.approx([0.4, 0.2, 0.4])
    assert verdicts.unknown_score[1] < threshold(0.05)
    assert verdicts.known.tolist() == [True, True, True]
    assert judge(OUTPUTS, RULE, given_task=1, alpha=0.21).known.tolist() == [True, False, True]


@pytest.mark.parametrize(("images", "known"), [(18, True), (19, True), (20, False)])
def test_a_task_with_fewer_than_one_over_alpha_images_rejects_nothing(images: int, known: bool) -> None:
    few, many = (TaskRule.fit(np.arange(count, dtype=float), classes=1) for count in (images, 500))
    rule = Rule(alpha=0.05, tasks=(many, few))
    outputs = {"logits": np.zeros((1, 2)), "distances": np.full((1, 2), 1e6)}
    assert judge(outputs, rule).known.tolist() == [known]
    assert judge(outputs, rule).p_value == pytest.approx([1 / (images + 1)])
    assert rule.blind_tasks() == ([1] if known else [])
    assert not judge(outputs, rule, given_task=0).known[0]


@pytest.mark.parametrize("images", [1, 5, 18, 19, 20, 60])
@pytest.mark.parametrize("alpha", [0.05, 0.051, 0.2])
def test_an_image_is_known_exactly_if_its_unknown_score_is_within_the_threshold(images: int, alpha: float) -> None:
    """Also for tasks with too few images to reject any, whose scores keep their order."""
    few, many = (TaskRule.fit(np.arange(count, dtype=float), classes=1) for count in (images, 500))
    rule, distances = Rule(alpha=alpha, tasks=(many, few)), np.array([1.0, 18.5, 30.0, 70.0, 1e3, 1e9])
    outputs = {"logits": np.zeros((6, 2)), "distances": np.stack([distances + 1e6, distances], axis=1)}
    verdicts = judge(outputs, rule)
    assert ((verdicts.unknown_score <= threshold(alpha)) == verdicts.known).all()
    blind = 1 in rule.blind_tasks()
    assert verdicts.known[-1] == blind
    own = verdicts.task_unknown_score[:, 1]
    assert (np.diff(own) >= 0).all()
    if 1 / (images + 1) > alpha + 0.001:
        assert own[-2] < own[-1]
    if not blind:
        assert own[-1] > 100


DRAWS = {
    "normal": lambda generator, size: generator.normal(size=size),
    "exponential": lambda generator, size: generator.exponential(size=size),
    "lognormal": lambda generator, size: generator.lognormal(size=size),
    "heavy": lambda generator, size: generator.standard_t(3, size=size),
}


@pytest.mark.parametrize("kind", DRAWS)
@pytest.mark.parametrize("images", [2, 4, 9, 20, 50, 200])
def test_a_tasks_own_images_are_accepted_as_often_as_promised(images: int, kind: str) -> None:
    """Over 1,000 draws of a task's own images, and 100 new ones each."""
    generator = np.random.default_rng(images)
    accepted = []
    for _ in range(1000):
        rule = Rule(alpha=0.05, tasks=(TaskRule.fit(DRAWS[kind](generator, images), classes=1),))
        fresh = DRAWS[kind](generator, (100, 1))
        accepted.append(judge({"logits": np.zeros((100, 1)), "distances": fresh}, rule).known.mean())
    assert np.mean(accepted) >= 0.94
    # The rule does not reach this by accepting everything.
    assert images < 20 or np.mean(accepted) < 0.985


@pytest.mark.parametrize(("alpha", "known"), [(0.59, True), (0.61, False)])
def test_alpha_decides_what_is_known(alpha: float, known: bool) -> None:
    assert judge(OUTPUTS, RULE, alpha=alpha).known[0] == known


def test_exactly_alpha_is_known() -> None:
    assert judge(OUTPUTS, RULE, alpha=2 / 5, given_task=1).known[0]


def test_rows_do_not_depend_on_each_other() -> None:
    together = judge(OUTPUTS, RULE)
    for row in range(len(LOGITS)):
        alone = judge({name: values[row : row + 1] for name, values in OUTPUTS.items()}, RULE)
        for one, many in zip(alone, together, strict=True):
            assert np.array_equal(one[0], many[row])


def test_a_task_is_as_foreign_as_its_nearest_class() -> None:
    rule = Rule(alpha=0.05, tasks=(TaskRule.fit([1.0, 2.0, 4.0], classes=2),))
    outputs = {"logits": np.array([[0.0, 5.0]] * 2), "distances": np.array([[2.0, 9.0], [0.0, 9.0]])}
    assert complete(outputs, rule)["scores"].tolist() == [[2.0], [0.0]]
    assert judge(outputs, rule).p_value == pytest.approx([3 / 4, 1.0])


def test_threshold_is_minus_log10_alpha() -> None:
    assert threshold(0.05) == pytest.approx(1.30103, abs=1e-5)


@pytest.mark.parametrize("scores", [[], [math.nan], [1.0, math.inf]])
def test_fit_refuses_scores_that_rank_nothing(scores: list[float]) -> None:
    with pytest.raises(ValueError, match="finite"):
        TaskRule.fit(scores, classes=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"alpha": 0.0}, "alpha"), ({"tasks": ()}, "tasks")],
)
def test_rule_refuses_bad_values(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Rule.model_validate({**RULE.model_dump(), **change})


SCORES = st.integers(-60, 60).map(lambda quarter: quarter / 4)


@st.composite
def strangers(draw: st.DrawFn, images: int) -> tuple[TaskRule, list[list[float]]]:
    """Another task with any statistics and any outputs for the images."""
    classes = draw(st.integers(1, 3))
    memory = draw(st.lists(SCORES, min_size=1, max_size=10))
    scores = st.lists(SCORES, min_size=classes, max_size=classes)
    return TaskRule.fit(memory, classes), draw(st.lists(scores, min_size=images, max_size=images))


@settings(deadline=None, max_examples=100)
@given(scores=st.lists(SCORES, min_size=2, max_size=40), share=st.floats(0.0, 1.0, exclude_max=True), others=st.data())
def test_exchangeable_images_are_accepted_at_least_1_minus_alpha(
    scores: list[float], share: float, others: st.DataObject
) -> None:
    """Whichever of n + 1 scores is the new one, at most alpha * (n + 1) of them are rejected (alpha >= 1 / (n + 1)).

    This holds in expectation, for any tasks learned before and after, and for any outputs of these tasks.
    """
    smallest = 1 / len(scores)
    alpha = smallest + share * (0.999 - smallest)
    before, after = (others.draw(st.lists(strangers(len(scores)), max_size=2)) for _ in range(2))
    rejected_alone = rejected = 0
    for new, score in enumerate(scores):
        own = TaskRule.fit(scores[:new] + scores[new + 1 :], classes=1), [[score]] * len(scores)
        rejected_alone += not _known([own], new, alpha)
        rejected += not _known([*before, own, *after], new, alpha)
    assert rejected <= rejected_alone <= alpha * len(scores) + 1e-9


def _known(tasks: list[tuple[TaskRule, list[list[float]]]], image: int, alpha: float) -> bool:
    distances = np.array([[value for _, outputs in tasks for value in outputs[image]]])
    rule = Rule(alpha=alpha, tasks=tuple(task for task, _ in tasks))
    return bool(judge({"logits": np.zeros_like(distances), "distances": distances}, rule).known[0])


# ---- one classifier over the classes of all tasks

JOINT = RULE.model_copy(update={"joint": True})


def test_a_joint_posterior_by_hand() -> None:
    outputs = complete(
        {"logits": np.log([[1.0, 2.0, 3.0, 4.0]]), "distances": np.array([[5.0, -3.0, 1.0, 2.0]])}, JOINT
    )
    assert outputs["probability"][0] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert outputs["p_task"][0] == pytest.approx([0.3, 0.7])
    assert outputs["p_within_task"][0] == pytest.approx([1 / 3, 2 / 3, 3 / 7, 4 / 7])
    # The nearest class of each task, as with any other rule: the posterior chooses the class, distances judge it.
    assert outputs["scores"][0].tolist() == [-3.0, 1.0]
    verdicts = decide(outputs, JOINT)
    assert (verdicts.class_id[0], verdicts.task[0], verdicts.known[0]) == (3, 1, True)
    assert decide(outputs, JOINT, given_task=0).class_id[0] == 1


@given(st.lists(st.floats(-300, 300), min_size=4, max_size=4))
def test_a_joint_posterior_is_the_product_of_its_parts(logits: list[float]) -> None:
    outputs = complete({"logits": np.array([logits]), "distances": np.zeros((1, 4))}, JOINT)
    product = outputs["p_within_task"] * outputs["p_task"][:, JOINT.task_of_class]
    assert product == pytest.approx(outputs["probability"], abs=1e-12)
    assert outputs["probability"].sum() == pytest.approx(1)
    verdicts = judge({"logits": np.array([logits]), "distances": np.zeros((1, 4))}, JOINT)
    # Of logits that differ by less than rounding, either is the largest.
    assert logits[verdicts.class_id[0]] == pytest.approx(max(logits), abs=1e-9)


def test_a_rule_from_before_joint_posteriors_reads_as_one_without() -> None:
    stored = RULE.model_dump()
    del stored["joint"]
    assert Rule.model_validate(stored) == RULE
