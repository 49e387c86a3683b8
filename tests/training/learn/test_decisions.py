"""Which decision a run is served with, and that each is what it is called."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from models.detectors import decisions
from models.detectors.task_scorer import LEAST_SPREAD, plain_scorer
from serving.bundle.decision import judge
from tests.helpers import learn_task, tiny_network, tiny_source, tiny_task, use_tiny_preset
from training import fit
from training.data.images import Images
from training.data.sources import Sources
from training.data.tasks import Batchable, task_data
from training.evaluate import main as evaluate
from training.learn import learner
from training.learn.correction import corrected
from training.learn.decisions import (
    CANDIDATES,
    added,
    changed_acceptance,
    changed_answers,
    choose,
    cross_entropies,
    has_constant_score,
    make_decider,
)
from training.learn.measurements import all_measurements, task_measurements
from training.measure.alternative_rules import learned_logits
from training.run import Run, open_run
from training.store.checkpoint import load

CPU = torch.device("cpu")
UNCORRECTED = [name for name, decision in decisions().items() if not decision.corrected]


@pytest.fixture(autouse=True)
def tiny_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    use_tiny_preset(monkeypatch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two tasks that keeps eight images."""
    place = tmp_path_factory.mktemp("decisions") / "run"
    with pytest.MonkeyPatch.context() as patch:
        use_tiny_preset(patch)
        assert fit.main(["--out", str(place), "--buffer", "8"]) == 0
    return place


@pytest.fixture
def run(folder: Path) -> Run:
    return open_run(folder, CPU)


def known_images(run: Run) -> Images:
    return tiny_source().test.of(run.config.labels)


def validation(run: Run, task: int) -> Batchable:
    config = run.config
    return task_data(Sources(config).of(config.lesson_of(task)), config, task, CPU).validation


def softmax(logits: NDArray[Any]) -> NDArray[np.float64]:
    exact = torch.from_numpy(np.asarray(logits, dtype=np.float64))
    return np.asarray(exact.softmax(dim=1).numpy())


def measured(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    capsys.readouterr()
    assert evaluate([str(folder), "--json", *options]) == 0
    return dict(json.loads(capsys.readouterr().out))


# ---- the paper's decisions


@pytest.mark.parametrize("name", ["paper", "paper+c"])
def test_the_papers_decision_is_the_softmax_of_all_logits_side_by_side(name: str, run: Run) -> None:
    pixels = tiny_source().test.pixels
    logits = learned_logits(run.network, pixels, CPU)["logits"].astype(np.float64)
    wanted = corrected(logits, run.corrections, run.rule.task_of_class) if name == "paper+c" else logits
    decider = make_decider(run.network, name, 0.05, run.corrections)
    verdicts = judge(decider.outputs(all_measurements(run.network, pixels, CPU)), decider.rule)
    assert (verdicts.class_id == wanted.argmax(axis=1)).all()
    np.testing.assert_allclose(verdicts.probability, softmax(wanted), rtol=1e-4, atol=1e-7)
    # It is neither that of the other, nor of calibrated logits.
    other = logits if name == "paper+c" else corrected(logits, run.corrections, run.rule.task_of_class)
    assert np.abs(verdicts.probability - softmax(other)).max() > 0.005


def test_an_unknown_decision_is_refused(run: Run) -> None:
    with pytest.raises(ValueError, match=r"decision is 'guess'; allowed: features, fused, relative\+energy, "):
        make_decider(run.network, "guess", 0.05)


def test_without_a_buffer_there_is_no_corrected_decision(run: Run) -> None:
    with pytest.raises(ValueError, match=r"decision paper\+c needs images .*: learn the run with --buffer"):
        make_decider(run.network, "paper+c", 0.05)


@pytest.mark.parametrize("name", UNCORRECTED)
def test_corrections_change_no_other_decision(name: str, run: Run) -> None:
    assert make_decider(run.network, name, 0.05, run.corrections) == make_decider(run.network, name, 0.05)


@pytest.mark.parametrize("name", [name for name, decision in decisions().items() if decision.standardised])
def test_scores_of_a_tasks_own_images_are_standardised(name: str, run: Run) -> None:
    decider = make_decider(run.network, name, 0.05)
    for task, scorer in enumerate(decider.scorers):
        detector = run.network.detector(task)
        scores = scorer.task_scores(detector.memory())
        assert float(scores.median()) == pytest.approx(0, abs=1e-4)
        excess = float(scores[scores > scores.median()].mean())
        # Scores that hardly differ are not scaled up: their mean excess, which was below LEAST_EXCESS, stays below 1.
        spreads = [
            float(
                plain_scorer(scorer.decision, [score], len(scorer.bias), scorer.scale, scorer.shift)
                .task_scores(detector.memory())
                .std(correction=0)
            )
            for score in scorer.scores
        ]
        assert excess == pytest.approx(1, rel=1e-3) or (excess < 1 and min(spreads) < LEAST_SPREAD)


# ---- the choice


@pytest.mark.parametrize(
    ("nats", "chosen"),
    [
        ({}, CANDIDATES[0]),
        (dict.fromkeys(CANDIDATES, 7.0), CANDIDATES[0]),
        ({**dict.fromkeys(CANDIDATES, 7.0), "paper": 6.9}, "paper"),
        ({"paper": 3.0, "features": 3.0}, "features"),
        ({"somebody else's": 0.0, "max_logit": 9.0}, "max_logit"),
    ],
)
def test_the_decision_with_the_smallest_cross_entropy_is_chosen(nats: dict[str, float], chosen: str) -> None:
    assert choose(nats) == chosen


@pytest.mark.parametrize(("nats", "chosen"), [(7.0, "max_logit"), (9.0, "max_logit"), (9.1, "paper")])
def test_a_decision_is_given_up_for_one_that_is_clearly_better(nats: float, chosen: str) -> None:
    """By more than one nat for each of two tasks."""
    assert choose({"fused": 50.0, "max_logit": nats, "paper": 7.0}, "max_logit", tasks=2) == chosen


def test_a_decision_that_is_no_candidate_any_more_is_given_up() -> None:
    assert choose({"fused": 5.0, "paper": 7.0}, "relative+energy", tasks=2) == "fused"


def test_scores_that_are_constant_for_a_task_of_one_class_are_no_candidates() -> None:
    network = tiny_network("hat")
    learn_task(network, tiny_task(1, seed=0, per_class=6))
    before = cross_entropies(network, tiny_task(1, seed=0, per_class=6).validation, 0.05)
    single = tiny_task(1, seed=1, classes=1, per_class=6)
    learn_task(network, single)
    assert has_constant_score(network, "relative")
    assert not has_constant_score(network, "features")
    nats = cross_entropies(network, single.validation, 0.05)
    assert set(before) - set(nats) == {"relative+energy"}
    assert set(added(before, nats)) == set(nats)


def test_images_in_memory_that_another_decision_accepts_are_counted(run: Run) -> None:
    same, total = changed_acceptance(run.network, "paper", "paper", 0.3)
    assert (same, total) == (0, sum(rule.images for rule in run.rule.tasks))
    changed, _ = changed_acceptance(run.network, "shallow", "max_softmax", 0.3)
    assert 0 < changed <= total


def test_cross_entropies_of_tasks_add_up() -> None:
    assert added({"paper": 2.0, "fused": 3.0}, {"paper": 5.5, "fused": 0.0}) == {"paper": 7.5, "fused": 3.0}
    assert added({}, {"paper": 5.0}) == {"paper": 5.0}


def of_the_true(probability: NDArray[Any], class_ids: NDArray[np.integer[Any]]) -> float:
    return float(-np.log(probability[np.arange(len(class_ids)), class_ids]).sum())


def test_cross_entropies_are_of_the_newest_task_among_all_classes(run: Run) -> None:
    held = validation(run, 1)
    nats = cross_entropies(run.network, held, 0.05)
    assert tuple(nats) == CANDIDATES
    pixels = np.ascontiguousarray(held.pixels.permute(0, 2, 3, 1).numpy())
    class_ids = held.local_classes.numpy() + 2
    for name in CANDIDATES:
        decider = make_decider(run.network, name, 0.05)
        verdicts = judge(decider.outputs(all_measurements(run.network, pixels, CPU)), decider.rule)
        assert nats[name] == pytest.approx(of_the_true(verdicts.probability, class_ids), abs=1e-4)
    plain = softmax(learned_logits(run.network, pixels, CPU)["logits"])
    assert nats["paper"] == pytest.approx(of_the_true(plain, class_ids), rel=1e-3)


def test_a_run_measures_each_task_when_it_is_the_newest(run: Run, folder: Path) -> None:
    total = 0.0
    for task, classes in enumerate((2, 4)):
        held = validation(run, task)
        pixels = np.ascontiguousarray(held.pixels.permute(0, 2, 3, 1).numpy())
        plain = softmax(learned_logits(run.network, pixels, CPU)["logits"][:, :classes])
        total += of_the_true(plain, held.local_classes.numpy() + 2 * task)
    progress = load(folder).progress
    assert progress.nats["paper"] == pytest.approx(total, rel=1e-3)
    assert progress.decision == choose(progress.nats) == run.decider.name == run.rule.score


# ---- a run measured by another decision


def test_evaluate_measures_by_the_decision_that_is_asked_for(
    run: Run, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = json.loads((folder / "metrics.json").read_text())
    assert measured(folder, capsys) == measured(folder, capsys, "--decision", "auto") == stored
    assert measured(folder, capsys, "--decision", stored["decision"]) == stored
    results = {name: measured(folder, capsys, "--decision", name) for name in decisions()}
    assert {name: result["decision"] for name, result in results.items()} == {name: name for name in decisions()}
    images = known_images(run)
    logits = learned_logits(run.network, images.pixels, CPU)["logits"]
    moved = corrected(logits, run.corrections, run.rule.task_of_class)
    for name, values in (("paper", logits), ("paper+c", moved)):
        guesses = np.array(run.config.labels)[values.argmax(axis=1)]
        assert results[name]["cil_accuracy"] == (guesses == images.labels).mean()
    assert len({json.dumps(result["nats"]) for result in results.values()}) > len(decisions()) / 2


def test_evaluate_refuses_a_decision_that_the_run_does_not_allow(
    folder: Path, tiny_hat: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate([str(tiny_hat), "--decision", "paper+c"]) == 2
    assert "error: decision paper+c needs images to correct the tasks by" in capsys.readouterr().err
    assert evaluate([str(folder), "--decision", "fussed"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: decision is 'fussed'; allowed: auto, features, fused, ")
    assert error.endswith("; did you mean 'fused'?\n")


def test_a_run_chooses_again_at_every_lesson_from_two_tasks_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The probabilities of an only task do not show how well tasks are separated."""
    nats = {name: 2 * float(name != "paper") for name in CANDIDATES}
    monkeypatch.setattr(learner, "cross_entropies", lambda *_: nats)
    out = ["--out", str(tmp_path / "run")]
    assert fit.main([*out, "--tasks", "zero,one"]) == 0
    assert load(tmp_path / "run").progress.decision == CANDIDATES[0]
    capsys.readouterr()
    assert fit.main([*out, "--add-task", "two; three"]) == 0
    assert load(tmp_path / "run").progress.decision == "paper"
    printed = " ".join(capsys.readouterr().err.split())
    assert "the decision is paper and no longer fused: cross-entropy on validation images 6.0 -> 0.0 nats" in printed
    # What the change does to answers is told for the images of all tasks, also of those learned earlier.
    found = re.search(r"of (\d+) validation images of 3 of 3 tasks, (\d+) get another class and (\d+) change", printed)
    assert found
    run = open_run(tmp_path / "run", CPU)
    sources = map(Sources(run.config).of, map(run.config.lesson_of, range(3)))
    held_back = [task_data(source, run.config, task, CPU).validation for task, source in enumerate(sources)]
    expected = changed_answers(run.network, "fused", "paper", run.rule.alpha, held_back)
    assert tuple(map(int, found.groups())) == (expected[2], *expected[:2])
    verdicts = [
        [judge(decider.outputs([task_measurements(run.network, task, each.pixels) for task in range(3)]), decider.rule)
         for each in held_back]
        for decider in (make_decider(run.network, name, run.rule.alpha) for name in ("fused", "paper"))
    ]  # fmt: skip
    assert expected[0] == sum((old.class_id != new.class_id).sum() for old, new in zip(*verdicts, strict=True))
    nats |= {"shallow": -19.0}
    assert fit.main([*out, "--add-task", "four"]) == 0
    assert load(tmp_path / "run").progress.decision == "shallow"
