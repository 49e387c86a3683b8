from __future__ import annotations

import math
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from pydantic import ValidationError

from serving.bundle import own_scores
from serving.bundle.decision import NETWORK_NAMES, OUTPUT_NAMES, Rule, TaskRule, complete, decide, judge
from serving.bundle.own_scores import OTHERS, threshold

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
        # A tenth of the tail after a score all but a thousandth of its step is done; halfway there, half of that.
        (2.05, 0.7001),
        (2.1, 0.6002),
        (2.55, 0.6001),
        (3.0, 0.6),
        (4.0, 0.4),
        # The median is 2.5, so the tail is the mean of 0.5 and 1.5.
        (4.1, 0.2002),
        # Beyond it, p falls as an exponential distribution with that mean.
        (5.1, 0.2002 / math.e),
        (104.1, 0.2002 * math.exp(-100)),
    ],
)
def test_p_value_by_hand(score: float, p_value: float) -> None:
    assert 10 ** -surprise(TASK, score) == pytest.approx(p_value, rel=1e-12)


def test_tied_scores_count_each() -> None:
    task = TaskRule.fit([1.0, 2.0, 2.0, 2.0], classes=1)
    assert (task.own_counts, task.images) == ((1, 3), 4)
    assert 10 ** -surprise(task, 2.0) == pytest.approx(4 / 5)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every task is judged by its own scores only, which is easier to follow by hand."""
    monkeypatch.setattr(own_scores, "OTHERS", 0)


@pytest.mark.usefixtures("alone")
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
    assert surprise(RULE.tasks[1], 3.0) == pytest.approx(-math.log10(0.2002) + 3.9 / math.log(10))
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


@pytest.mark.usefixtures("alone")
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
    # The task that can reject does so with the scores of all tasks.
    assert judge(outputs, rule).p_value == pytest.approx([1 / (images + 1) if known else 1 / (501 + OTHERS)])
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


@pytest.mark.long
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


def slow_p_value(tasks: list[list[float]], task: int, score: float) -> float:
    """The definition: own scores, one more, and OTHERS of the shape of all tasks' scores."""
    own, every = tasks[task], []
    for scores in tasks:
        center = np.median(scores)
        tail = np.mean([each - center for each in scores if each > center])
        every += [(each - center) / tail for each in scores]
        if scores is own:
            relative = (score - center) / tail
    share = np.mean([each >= relative for each in every])
    return float((1 + sum(each >= score for each in own) + OTHERS * share) / (len(own) + 1 + OTHERS))


def test_the_scores_of_all_tasks_count_for_each() -> None:
    generator = np.random.default_rng(0)
    tasks = [(scale * generator.exponential(size=count) + shift).tolist()
             for scale, count, shift in ((1, 30, 0), (5, 40, 3), (0.1, 200, -1))]  # fmt: skip
    rule = Rule(alpha=0.05, tasks=tuple(TaskRule.fit(scores, classes=1) for scores in tasks))
    # Just before a stored score, where the lines are down on the steps.
    for task, scores in enumerate(tasks):
        for score in sorted(scores)[-12::3]:
            found = 10 ** -rule.surprise(np.full((1, 3), score))[0, task]
            assert found == pytest.approx(slow_p_value(tasks, task, score), rel=0.02)


TASKS = 8


def known_by(tasks: list[NDArray[np.float64]], distances: NDArray[np.float64]) -> NDArray[np.bool_]:
    rule = Rule(alpha=0.05, tasks=tuple(TaskRule.fit(scores, classes=1) for scores in tasks))
    return judge({"logits": np.zeros_like(distances), "distances": distances}, rule).known


@pytest.mark.long
@pytest.mark.parametrize("kind", DRAWS)
@pytest.mark.parametrize("images", [20, 50, 200])
def test_with_many_tasks_own_images_are_still_accepted(images: int, kind: str) -> None:
    """By their own task alone: the other tasks find them very unusual."""
    generator, accepted = np.random.default_rng(images), []
    for _ in range(200):
        tasks = [DRAWS[kind](generator, images) for _ in range(TASKS)]
        distances = np.full((100, TASKS), 1e9)
        distances[:, 0] = DRAWS[kind](generator, 100)
        accepted.append(known_by(tasks, distances).mean())
    # With 20 images, the median and the mean excess of a task are themselves uncertain.
    assert np.mean(accepted) >= (0.93 if images == 20 else 0.94)


def test_a_task_with_one_odd_image_does_not_open_the_model_to_everything() -> None:
    """Twenty-seven scores of each task, of which one task has an odd one: unknown images far from all tasks."""
    generator = np.random.default_rng(0)
    tasks = [generator.exponential(size=27) for _ in range(TASKS)]
    tasks[3][5] = 30.0
    unknown = 20 + generator.exponential(size=(300, TASKS))
    assert not known_by(tasks, unknown).any()
    with mock.patch.object(own_scores, "OTHERS", 0):
        assert known_by(tasks, unknown).all()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("alpha", "known"), [(0.59, True), (0.61, False)])
def test_alpha_decides_what_is_known(alpha: float, known: bool) -> None:
    assert judge(OUTPUTS, RULE, alpha=alpha).known[0] == known


@pytest.mark.usefixtures("alone")
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

    This holds in expectation for a single task and, if tasks do not count each other's scores, for any tasks learned
    before and after and any outputs of these tasks.
    """
    smallest = 1 / len(scores)
    alpha = smallest + share * (0.999 - smallest)
    before, after = (others.draw(st.lists(strangers(len(scores)), max_size=2)) for _ in range(2))
    rejected_alone = rejected = 0
    for new, score in enumerate(scores):
        own = TaskRule.fit(scores[:new] + scores[new + 1 :], classes=1), [[score]] * len(scores)
        rejected_alone += not _known([own], new, alpha)
        with mock.patch.object(own_scores, "OTHERS", 0):
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


def test_the_best_of_many_ranks_is_ranked_among_those_of_known_images() -> None:
    """Ten tasks give an image ten chances; known images had them too, and so the threshold is stricter."""
    generator = np.random.default_rng(0)
    own = generator.normal(size=(10, 400))
    alone = Rule(alpha=0.05, tasks=tuple(TaskRule.fit(scores, classes=1) for scores in own))

    def known(images: int) -> NDArray[np.float64]:
        """Scores [images, tasks] of images that are far from all tasks but one."""
        far = 2.0 + generator.normal(size=(images, 10))
        far[np.arange(images), np.arange(images) % 10] -= 2.0
        return far

    best = alone.surprise(known(4000)).min(axis=1)
    ranked = Rule(
        alpha=0.05,
        tasks=tuple(TaskRule.fit(scores, 1, best[task::10]) for task, scores in enumerate(own)),
    )
    accepted, rejected = {}, {}
    for name, rule in (("alone", alone), ("ranked", ranked)):
        for found, scores in ((accepted, known(4000)), (rejected, 2.0 + generator.normal(size=(4000, 10)))):
            outputs = {"logits": np.zeros((4000, 10)), "distances": scores}
            verdicts = judge(outputs, rule)
            assert (verdicts.known == (verdicts.unknown_score <= threshold(0.05))).all()
            found[name] = verdicts.known.mean() if found is accepted else 1 - verdicts.known.mean()
    assert accepted["alone"] > 0.98
    assert accepted["ranked"] == pytest.approx(0.95, abs=0.012)
    assert rejected["ranked"] > rejected["alone"] + 0.1


def test_a_task_with_few_images_does_not_stop_a_run_from_rejecting_if_ranks_are_pooled() -> None:
    many, few = np.arange(200) / 100, np.arange(5) / 5
    tasks = (TaskRule.fit(many, 1, many), TaskRule.fit(few, 1, few))
    rule = Rule(alpha=0.05, tasks=tasks)
    assert rule.blind_tasks() == []
    assert Rule(alpha=0.05, tasks=tasks[1:]).blind_tasks() == [0]
    far = {"logits": np.zeros((1, 2)), "distances": np.full((1, 2), 50.0)}
    assert not judge(far, rule).known[0]
    assert judge(far, rule, given_task=1).known[0], "five images alone can reject nothing"
    bounded = judge({name: values[:, 1:] for name, values in far.items()}, Rule(alpha=0.05, tasks=tasks[1:]))
    assert bounded.known[0]
    mixed = Rule(alpha=0.05, tasks=(tasks[0], TaskRule.fit(few, 1)))
    assert mixed.overall is None, "a task without surprises is judged alone, and so are all"


def test_many_tasks_of_few_images_do_not_make_everything_known_if_the_expected_surprise_decides() -> None:
    ranks = -np.log10(np.arange(1, 201) / 201)
    few = np.arange(10) / 10
    small = [TaskRule.fit(few, 1, ranks[:10], ranks[:10]) for _ in range(20)]
    tasks = (TaskRule.fit(np.arange(200) / 100, 1, ranks, ranks), *small)
    smallest, expected = (Rule(alpha=0.05, tasks=tasks, joint=True, expectation=wanted) for wanted in (False, True))
    # By the classifier both images belong to the first task. The second is far from it, and near some small task.
    logits = np.zeros((2, 21))
    logits[:, 0] = 20.0
    distances = np.full((2, 21), 0.5)
    distances[:, 0] = 0.5, 6.0
    outputs = {"logits": logits, "distances": distances}
    assert judge(outputs, smallest).known.tolist() == [True, True]
    assert judge(outputs, expected).known.tolist() == [True, False]
    # Doubt about the task counts as well, and one more task that nobody takes the image for changes nothing.
    unsure = judge({**outputs, "logits": np.zeros((2, 21))}, expected).unknown_score
    sure = judge(outputs, expected).unknown_score
    assert unsure[0] > sure[0]
    more = Rule(alpha=0.05, tasks=(*tasks, small[0]), joint=True, expectation=True)
    wider = {"logits": np.pad(logits, ((0, 0), (0, 1))), "distances": np.pad(distances, ((0, 0), (0, 1)))}
    np.testing.assert_allclose(judge(wider, more).unknown_score, sure, atol=1e-3)
    # A part of the tasks is decided in the same way.
    assert more.of([0, 1]) == Rule(alpha=0.05, tasks=more.tasks[:2], joint=True, expectation=True)
    # Without stored expectations, the smallest surprise decides as before.
    old = tuple(TaskRule.fit(np.arange(200) / 100, 1, ranks) for _ in range(21))
    assert not Rule(alpha=0.05, tasks=old, joint=True, expectation=True).by_expectation


def test_images_that_had_few_tasks_beside_them_do_not_set_the_threshold_for_many() -> None:
    low, high = np.linspace(0, 1, 150), np.linspace(0, 3, 150)
    tasks = tuple(TaskRule.fit(low, 10, values, values) for values in (low, low, high, high))
    rule = Rule(alpha=0.05, tasks=tasks, joint=True, expectation=True)
    assert rule.overall is not None
    assert (rule.overall.images, max(rule.overall.own_scores)) == (300, 3.0)
    # A lesson of few images needs those of the run.
    taught = Rule(
        alpha=0.05, tasks=(tasks[0], TaskRule.fit(low[:8], 1, low[:8], low[:8])), joint=True, expectation=True
    )
    assert taught.overall is not None
    assert taught.overall.images == 158
    assert taught.blind_tasks() == []
