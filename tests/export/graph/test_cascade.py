"""Only candidate tasks see an image rotated, and only if validation images show the same answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from export.__main__ import main
from export.graph import cascade, notes
from export.graph.cascade import CascadeError, RotatedOutputs, agreement, cascaded, choose_cascade, rotated_outputs
from export.graph.evidence import Evidence
from models.detectors import Decision
from models.detectors.mixture import DeepMixture
from models.detectors.task_scorer import TaskScorer
from serving.bundle.decision import Rule, TaskRule
from serving.bundle.manifest import load_bundle
from serving.bundle.model import BundleModel
from serving.bundle.sections import Cascade
from tests.export.networks import evidence_for, learned, pixels_for, put_run, run_of
from training.learn.decisions import Decider

OFF = Cascade(candidates=None, agreement=None, images=0)


def decider_of(tasks: int) -> Decider:
    """Tasks of one class whose validation images have distances around 0."""
    deep = DeepMixture("deep", classes=1)
    scorer = TaskScorer(Decision(("deep",)), (deep,), scale=1.0, shift=0.0, weights=((1.0,),), bias=(0.0,))
    rule = Rule(score="deep", tasks=(TaskRule.fit(np.linspace(-1, 1, 99), classes=1),) * tasks)
    return Decider("deep", (scorer,) * tasks, rule)


def outputs_at(distances: NDArray[np.floating]) -> RotatedOutputs:
    """Outputs of tasks with one class each, from distances per rotation [4, images, tasks]."""
    columns = torch.from_numpy(distances).split(1, dim=2)
    tasks = [{"logits": torch.zeros_like(column), "deep": column} for column in columns]
    return RotatedOutputs(decider_of(len(tasks)), tasks)


def distances_of(images: int, tasks: int, surprising: int) -> NDArray[np.floating]:
    """Upright, every image is nearest to task 0, then to task 1; rotated, some are nearest to task 1."""
    distances = np.ones((4, images, tasks)) * np.arange(tasks)
    if surprising:
        distances[1:, :surprising, 1] = -3
    return distances


def outputs_of(images: int, tasks: int, surprising: int) -> RotatedOutputs:
    return outputs_at(distances_of(images, tasks, surprising))


def answer_with(patch: pytest.MonkeyPatch, outputs: RotatedOutputs) -> None:
    """Replace the network's outputs when the cascade is chosen."""
    patch.setattr(cascade, "rotated_outputs", lambda *_: outputs)


def choose(patch: pytest.MonkeyPatch, wanted: str, *, images: int, tasks: int, surprising: int = 0) -> Cascade:
    answer_with(patch, outputs_of(images, tasks, surprising))
    return choose_from(evidence_of(images, tasks), wanted, tasks)


def evidence_of(images: int, tasks: int) -> Evidence:
    """Images of this many tasks in turn."""
    of_task = np.arange(images) % tasks
    return Evidence(pixels_for(learned("hat", "convnet"), images), of_task, of_task, ())


def choose_from(evidence: Evidence, wanted: str, tasks: int) -> Cascade:
    return choose_cascade(learned("hat", "convnet"), decider_of(tasks), evidence, wanted)


def test_a_task_that_cannot_win_keeps_its_outputs_for_the_upright_image() -> None:
    measured = outputs_of(2, 3, surprising=1)
    outputs = cascaded(measured, 1)["distances"]
    assert outputs.tolist() == [[0, 1, 2], [0, 1, 2]]
    outputs = cascaded(measured, 2)["distances"]
    assert outputs.tolist() == [[0, (1 - 9) / 4, 2], [0, 1, 2]]
    assert cascaded(measured, None)["distances"].tolist() == outputs.tolist()


def test_tasks_that_are_equally_near_are_all_seen() -> None:
    distances = np.stack([np.ones((1, 3)), *[np.full((1, 3), 5.0)] * 3])
    assert cascaded(outputs_at(distances), 1)["distances"].tolist() == [[4, 4, 4]]


def test_agreement_counts_classes_and_what_is_known() -> None:
    assert agreement(outputs_of(1000, 3, surprising=10), 1) == 0.99
    assert agreement(outputs_of(1000, 3, surprising=10), 2) == 1
    distances = distances_of(4, 2, surprising=0)
    # The best task stays the best, but rejects the rotated image: without a cascade no task accepts it.
    distances[1:, 0, 0] = 90
    distances[:, 0, 1] = 95
    assert agreement(outputs_at(distances), 1) == 1
    distances[1:, 1, 1] = -3
    assert agreement(outputs_at(distances), 1) == 0.75


def test_auto_is_off_with_fewer_than_a_thousand_images(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(monkeypatch, "auto", images=999, tasks=3) == OFF
    assert choose(monkeypatch, "auto", images=1000, tasks=3) == Cascade(
        candidates=1, seen=1.0, agreement=1.0, images=1000
    )


@pytest.mark.parametrize(("surprising", "candidates", "agreeing"), [(1, 1, 0.999), (2, 2, 1.0)])
def test_the_fewest_tasks_that_agree_in_999_of_1000_images(
    surprising: int, candidates: int, agreeing: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = choose(monkeypatch, "auto", images=1000, tasks=3, surprising=surprising)
    assert chosen == Cascade(candidates=candidates, seen=candidates, agreement=agreeing, images=1000)


def test_images_that_leave_no_doubt_are_seen_by_the_best_task_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    distances = distances_of(1000, 4, surprising=0)
    # Fifty images are almost as close to task 1 and closer when rotated; all others are far from it.
    distances[:, :, 1] = 3
    distances[0, :50, 1], distances[1:, :50, 1] = 0.4, -3
    answer_with(monkeypatch, outputs_at(distances))
    chosen = choose_from(evidence_of(1000, 4), "auto", 4)
    assert chosen == Cascade(candidates=2, margin=0.5, seen=1.05, agreement=1.0, images=1000)


def test_poor_agreement_disables_the_cascade_and_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = choose(monkeypatch, "auto", images=1000, tasks=2, surprising=2)
    assert chosen == Cascade(candidates=None, agreement=0.998, images=1000)


def test_poor_agreement_is_refused_where_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        CascadeError, match=r"--cascade on: at most 99\.80% of 1000 validation images .*; needed 99\.9%"
    ):
        choose(monkeypatch, "on", images=1000, tasks=2, surprising=2)


def test_on_takes_what_images_there_are_and_refuses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(monkeypatch, "on", images=10, tasks=3) == Cascade(candidates=1, seen=1.0, agreement=1.0, images=10)
    with pytest.raises(CascadeError, match="--cascade on: no validation image is available"):
        choose(monkeypatch, "on", images=0, tasks=3)


def test_off_is_off_and_one_task_sees_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(monkeypatch, "off", images=1000, tasks=3) == OFF
    assert choose(monkeypatch, "auto", images=1000, tasks=1) == OFF
    assert choose(monkeypatch, "off", images=1000, tasks=1) == OFF
    with pytest.raises(CascadeError, match="--cascade on: there is only one task, so there is none to skip"):
        choose(monkeypatch, "on", images=1000, tasks=1)


def test_auto_is_off_if_a_task_has_no_image(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer_with(monkeypatch, outputs_of(1000, 3, surprising=0))
    evidence = replace(evidence_of(1000, 3), tasks=np.ones(1000, dtype=int))
    assert choose_from(evidence, "auto", 3) == OFF
    note = "note: no cascade: no validation image of task 0, 2 is available to show that it changes nothing\n"
    assert capsys.readouterr().err == note
    assert choose_from(evidence, "on", 3).candidates == 1


def test_a_cascade_that_saves_too_little_is_not_used_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    distances = distances_of(1000, 4, surprising=0)
    # Rotated, every image belongs to task 2, which takes three candidates to find: 13 of 16 views.
    distances[1:, :, 2] = -5
    answer_with(monkeypatch, outputs_at(distances))
    chosen = choose_from(evidence_of(1000, 4), "auto", 4)
    assert chosen == Cascade(candidates=None, seen=3.0, agreement=1.0, images=1000)
    assert choose_from(evidence_of(1000, 4), "on", 4).candidates == 3
    monkeypatch.setattr(cascade, "WORTH_IT", 13 / 16)
    assert choose_from(evidence_of(1000, 4), "auto", 4).candidates == 3


def test_choosing_a_cascade_for_a_long_time_reports_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    network = learned("hat", "convnet", (1, 1))
    rotated_outputs(network, decider_of(2), pixels_for(network, 5))
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(notes, "SILENT_SECONDS", 0.0)
    rotated_outputs(network, decider_of(2), pixels_for(network, 5))
    note = "note: tasks that have seen 5 images in all rotations: "
    assert capsys.readouterr().err == f"{note}0 of 2\n{note}1 of 2\n"


# ---- through the command


@pytest.mark.parametrize(("wanted", "candidates"), [("auto", 1), ("off", None)])
def test_the_manifest_records_the_cascade_and_the_graph_has_it(
    wanted: str,
    candidates: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    network = learned("hat", "convnet", (1, 1, 1))
    answer_with(monkeypatch, outputs_of(1000, 3, surprising=1))
    run = put_run(monkeypatch, tmp_path / "run", run_of(network), evidence_for(network, 1000))
    assert main([str(run), "--out", str(tmp_path / "bundle"), "--cascade", wanted]) == 0
    manifest = load_bundle(tmp_path / "bundle").manifest
    assert manifest.cascade == (
        OFF if candidates is None else Cascade(candidates=1, seen=1.0, agreement=0.999, images=1000)
    )
    how = "all tasks see all rotations" if candidates is None else "at most 1 tasks see all rotations"
    assert how in capsys.readouterr().out
    model = BundleModel.load(tmp_path / "bundle", provider="cpu")
    model.self_test()
    graph = (tmp_path / "bundle" / "model.fp32.onnx").read_bytes()
    assert (b"task2/again/If" in graph) == (candidates is not None)


def test_a_cascade_that_changes_answers_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    network = learned("hat", "convnet", (1, 1))
    answer_with(monkeypatch, outputs_of(40, 2, surprising=2))
    run = put_run(monkeypatch, tmp_path / "run", run_of(network), evidence_for(network))
    (tmp_path / "place").mkdir()
    assert main([str(run), "--out", str(tmp_path / "place" / "bundle"), "--cascade", "on"]) == 2
    assert "error: --cascade on: at most 95.00% of 40 validation images" in capsys.readouterr().err
    assert list((tmp_path / "place").iterdir()) == []
