from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from serving.bundle.decision import Rule, TaskRule
from serving.bundle.layout import MAPS
from serving.bundle.model import BundleModel
from serving.bundle.sections import TaskInfo
from serving.errors import ParameterError
from serving.http.schemas import CascadeDescription
from serving.inference.answers import AnswerFormatter, PredictionOptions, answer_image, describe
from serving.predict import main as predict
from tests.helpers_serving import COLOURS, GREY, image_bytes, reseal
from tests.helpers_teaching import picture, trunk_graph, write_bundle


@pytest.mark.parametrize("label", COLOURS)
def test_every_class_is_known_by_its_colour(model: BundleModel, label: str) -> None:
    answer = answer_image(model, image_bytes(COLOURS[label]), PredictionOptions.for_model(model))
    assert (answer.label, answer.known, answer.best_guess) == (label, True, label)
    assert model.manifest.labels[answer.class_id] == label
    assert answer.unknown_score <= answer.threshold


def test_grey_is_unknown_but_has_a_best_guess(model: BundleModel) -> None:
    answer = answer_image(model, image_bytes(GREY), PredictionOptions.for_model(model))
    assert (answer.label, answer.known) == ("unknown", False)
    assert answer.best_guess in COLOURS
    assert answer.unknown_score > answer.threshold == -math.log10(0.05)


def test_the_numbers_of_an_answer_agree_with_each_other(model: BundleModel) -> None:
    answer = answer_image(model, image_bytes((200, 90, 40)), PredictionOptions.for_model(model, top=4))
    assert answer.confidence == pytest.approx(answer.p_within_task * answer.p_task, rel=1e-6)
    assert answer.top[0].probability == answer.confidence
    assert (answer.top[0].label, answer.top[0].class_id, answer.top[0].task) == (
        answer.best_guess,
        answer.class_id,
        answer.task,
    )
    assert sum(entry.probability for entry in answer.top) == pytest.approx(1)
    assert [entry.probability for entry in answer.top] == sorted((e.probability for e in answer.top), reverse=True)
    assert {(entry.class_id, entry.task) for entry in answer.top} == {(0, 0), (1, 0), (2, 1), (3, 1)}
    assert answer.tasks[answer.task].p_task == answer.p_task
    assert answer.tasks[answer.task].best_label == answer.best_guess
    assert answer.unknown_score == min(task.unknown_score for task in answer.tasks)
    least = model.bundle.rule.least_p_values(answer.alpha)
    nearest = min(answer.tasks, key=lambda task: task.unknown_score).task
    assert answer.p_value == pytest.approx(max(10**-answer.unknown_score, least[nearest]))


def test_within_a_given_task(model: BundleModel) -> None:
    answer = answer_image(model, image_bytes(COLOURS["red"]), PredictionOptions.for_model(model, task=1))
    assert (answer.task, answer.p_task) == (1, 1.0)
    assert answer.best_guess == "yellow"
    assert not answer.known


def test_alpha_moves_the_threshold(model: BundleModel) -> None:
    colour = (255, 65, 0)
    strict, lenient = (
        answer_image(model, image_bytes(colour), PredictionOptions.for_model(model, alpha=alpha))
        for alpha in (0.9, 0.01)
    )
    assert not strict.known
    assert lenient.known
    assert strict.unknown_score == lenient.unknown_score
    assert (strict.alpha, lenient.threshold) == (0.9, 2.0)


def test_three_classes_are_listed_unless_asked(model: BundleModel) -> None:
    assert len(answer_image(model, image_bytes(), PredictionOptions.for_model(model)).top) == 3
    assert len(answer_image(model, image_bytes(), PredictionOptions.for_model(model, top=1)).top) == 1


def test_a_class_that_is_called_unknown_stays_known(model: BundleModel) -> None:
    tasks = model.manifest.tasks
    renamed = TaskInfo(**{**tasks[0].model_dump(), "labels": ("unknown", "green")})
    manifest = model.manifest.model_copy(update={"tasks": (renamed, *tasks[1:])})
    verdicts = model.predict(np.broadcast_to(np.array(COLOURS["red"], np.uint8), (1, 8, 8, 3)))
    fields = AnswerFormatter(manifest).fields(verdicts, 0, PredictionOptions.for_model(model))
    assert (fields["label"], fields["known"]) == ("unknown", True)


@pytest.mark.parametrize(
    ("asked", "allowed"),
    [
        ({"task": 2}, "0 to 1"),
        ({"task": -1}, "0 to 1"),
        ({"alpha": 0.0}, "0 < alpha < 1"),
        ({"alpha": 1.0}, "0 < alpha < 1"),
        ({"alpha": math.nan}, "0 < alpha < 1"),
        ({"top": 0}, "1 to 4"),
        ({"top": 5}, "1 to 4"),
    ],
)
def test_what_cannot_be_answered_is_refused(model: BundleModel, asked: dict[str, float], allowed: str) -> None:
    with pytest.raises(ParameterError) as refused:
        PredictionOptions.for_model(model, **asked)  # type: ignore[arg-type]
    assert refused.value.allowed == allowed


def test_an_operator_may_set_alpha(bundle: Path, model: BundleModel) -> None:
    stricter = BundleModel.load(bundle, provider="cpu", alpha=0.2)
    described = describe(stricter)
    assert (described.alpha, described.expected_acceptance) == (0.2, 0.8)
    assert described.threshold == pytest.approx(-math.log10(0.2))
    assert PredictionOptions.for_model(stricter).alpha == 0.2
    assert PredictionOptions.for_model(stricter, alpha=0.01).alpha == 0.01
    assert (PredictionOptions.for_model(model).alpha, describe(model).expected_acceptance) == (0.05, 0.95)


def with_images(model: BundleModel, images: int) -> BundleModel:
    """The same model, whose second task has the scores of so many images."""
    rule = model.bundle.rule
    few = TaskRule.fit(np.log(np.arange(1, images + 1) / 1000), classes=2)
    changed = Rule(score=rule.score, alpha=rule.alpha, tasks=(rule.tasks[0], few))
    return replace(model, bundle=replace(model.bundle, rule=changed))


@pytest.mark.parametrize(("images", "rejects"), [(19, False), (20, True)])
def test_a_model_with_too_few_images_of_a_task_calls_nothing_unknown_and_describes_that(
    model: BundleModel, images: int, rejects: bool
) -> None:
    few = with_images(model, images)
    assert describe(few).rejects_unknown == rejects
    assert [task.own_images for task in describe(few).tasks] == [99, 99], "the number of the manifest"
    answer = answer_image(few, image_bytes(GREY), PredictionOptions.for_model(few))
    assert answer.known == (not rejects)
    assert (answer.unknown_score <= answer.threshold) == answer.known
    # So that bars, which end at the unknown scores, agree with the answer.
    assert any(task.unknown_score <= answer.threshold for task in answer.tasks) == answer.known
    wider = answer_image(few, image_bytes(GREY), PredictionOptions.for_model(few, alpha=0.1))
    assert not wider.known


def test_description_of_what_is_served(model: BundleModel) -> None:
    described = describe(model)
    assert [task.labels for task in described.tasks] == [("red", "green"), ("blue", "yellow")]
    assert (described.alpha, described.provider) == (0.05, "CPUExecutionProvider")
    assert (described.precision, described.precisions) == ("fp32", ("fp32",))
    assert described.cascade == CascadeDescription(candidates=None, margin=None, seen=None, agreement=None, images=0)


def test_a_bundle_without_a_usable_map_is_not_explained_and_the_reason_is_given(
    model: BundleModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also one that was written with a graph that has no map; averages are in tests/models/trunks/test_maps.py."""
    bundle = write_bundle(tmp_path / "bundle")
    reseal(bundle, MAPS, trunk_graph())
    (tmp_path / "photo.png").write_bytes(picture("ant", 0))
    with_trunk = BundleModel.load(bundle, provider="cpu")
    for each, reason in ((model, "it has no trunk"), (with_trunk, "its bundle has no feature maps of trunk tiny")):
        assert not describe(each).explains
        with pytest.raises(ParameterError, match=reason) as refused:
            PredictionOptions.for_model(each, explain="true")
        assert refused.value.status == 422
    assert predict([str(bundle), str(tmp_path / "photo.png"), "--explain", "true"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert "its bundle has no feature maps of trunk tiny: got explain=true; allowed: false" in line
