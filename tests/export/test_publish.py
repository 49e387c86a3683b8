"""Publishing a run that learned more: earlier tasks stay byte for byte the same, or nothing is published."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import torch

from export import exporter
from export.__main__ import main
from export.checks import parity
from export.checks import remembering as publishing
from export.checks.remembering import Allowed, PublishError, check_remembers
from export.graph import session as opened
from models.masks.supermask import MaskedLayer
from models.network import Network
from serving.bundle.decision import Outputs, Rule, TaskRule, Verdicts, decide
from serving.bundle.manifest import Manifest, load_bundle
from serving.bundle.sections import Cascade
from serving.bundle.shelf import Shelf
from tests.export.conftest import Exported
from tests.export.networks import decider_for, evidence_for, learned, put_run, run_of, with_another_task
from tests.helpers import HELD_OUT, use_tiny_preset
from training import fit
from training.learn.decisions import Decider

SIZES = (2, 3)
Publish = Callable[..., int]


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "shelf")


@pytest.fixture
def publish(tmp_path: Path, shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> Publish:
    """Publish a network as if it were a run's; returns the exit code."""
    # The limits for int8 do not apply to random weights.
    monkeypatch.setattr(parity, "AGREEING", {})
    monkeypatch.setattr(parity, "AUROC_CHANGE", 2)

    def do(network: Network, *options: str, decider: Decider | None = None) -> int:
        folder = put_run(monkeypatch, tmp_path / "run", run_of(network, decider), evidence_for(network, 20))
        # Answers of random weights are random, so new classes take many of the old ones' images.
        return main([str(folder), "--publish", str(shelf.folder), "--max-loss", "100", *options])

    return do


def current(shelf: Shelf) -> Manifest:
    place = shelf.current()
    assert place is not None
    return load_bundle(place).manifest


def parts(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.bin")}


def names(shelf: Shelf) -> set[str]:
    return {path.name for path in shelf.folder.iterdir()}


def test_the_first_bundle_goes_on_from_none(publish: Publish, shelf: Shelf, capsys: pytest.CaptureFixture[str]) -> None:
    assert publish(learned("hat", "convnet", SIZES)) == 0
    manifest = current(shelf)
    assert names(shelf) == {"current", manifest.version}
    assert os.readlink(shelf.folder / "current") == manifest.version
    assert manifest.before is None
    assert [task.unchanged for task in manifest.tasks] == [False, False]
    printed = capsys.readouterr().out
    assert printed.startswith(f"{shelf.folder / manifest.version}: ")
    assert "2 tasks (0 unchanged)" in printed


@pytest.mark.parametrize("method", ["hat", "sup"])
def test_one_more_task_adds_a_part_and_changes_none(method: str, publish: Publish, shelf: Shelf) -> None:
    network = learned(method, "convnet", SIZES)
    assert publish(network, "--precision", "int8") == 0
    first = shelf.current()
    assert publish(with_another_task(network), "--precision", "int8") == 0
    second = shelf.current()
    assert first is not None
    assert second is not None
    old, new = parts(first), parts(second)
    assert {name: new[name] for name in old} == old
    assert new.keys() - old.keys() == {"task2.bin", "task2.fp32.bin", "task2.int8.bin"}
    assert ("shared.bin" in old) == (method == "sup")
    manifest = current(shelf)
    assert manifest.before == first.name
    assert [task.unchanged for task in manifest.tasks] == [True, True, False]
    assert shelf.previous() == first


def test_a_part_that_exists_in_one_more_precision_is_not_unchanged(publish: Publish, shelf: Shelf) -> None:
    network = learned("hat", "convnet", SIZES)
    assert publish(network) == 0
    assert publish(network, "--precision", "int8") == 0
    assert [task.unchanged for task in current(shelf).tasks] == [False, False]


def test_export_to_a_place_knows_the_bundle_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network, out = learned("hat", "convnet", SIZES), tmp_path / "bundle"
    for step in (network, with_another_task(network)):
        folder = put_run(monkeypatch, tmp_path / "run", run_of(step))
        before = load_bundle(out).manifest.version if out.exists() else None
        assert main([str(folder), "--out", str(out)]) == 0
        assert load_bundle(out).manifest.before == before
    assert [task.unchanged for task in load_bundle(out).manifest.tasks] == [True, True, False]


def test_publishing_the_same_again_changes_nothing(publish: Publish, shelf: Shelf) -> None:
    for _ in range(2):
        assert publish(learned("hat", "convnet", SIZES)) == 0
        assert names(shelf) == {"current", current(shelf).version}
        assert current(shelf).before is None


def test_a_real_run_goes_on(
    exported_hat: Exported, shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_tiny_preset(monkeypatch)
    folder = Path(shutil.copytree(exported_hat.folder, tmp_path / "run"))
    assert main([str(folder), "--publish", str(shelf.folder), "--force"]) == 0
    first = shelf.current()
    assert fit.main(["--out", str(folder), "--add-task", HELD_OUT]) == 0
    assert main([str(folder), "--publish", str(shelf.folder), "--force"]) == 0
    manifest = current(shelf)
    assert first is not None
    assert manifest.before == first.name
    assert manifest.labels[-1] == HELD_OUT
    assert [task.unchanged for task in manifest.tasks] == [True, True, False]


# ---- what is refused


@pytest.fixture
def refused(publish: Publish, shelf: Shelf, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Publish a network that must be refused; returns the error message."""

    def do(network: Network, *options: str, decider: Decider | None = None) -> str:
        before, link = names(shelf), os.readlink(shelf.folder / "current")
        assert publish(network, *options, decider=decider) == 2
        assert names(shelf) == before
        assert os.readlink(shelf.folder / "current") == link
        error = capsys.readouterr().err
        assert error.splitlines()[-1].startswith("error: ")
        return error

    return do


def altered(network: Network, change: Callable[[Network], None]) -> Network:
    other = with_another_task(network)
    with torch.no_grad():
        change(other)
    return other


def one_bit(network: Network) -> None:
    bias = network.head(0).bias
    bias.view(torch.int32)[0, 0, 0] ^= 1


def test_an_earlier_task_that_changed_by_a_bit_is_refused(
    publish: Publish, refused: Callable[..., str], shelf: Shelf
) -> None:
    network = learned("hat", "convnet", SIZES)
    assert publish(network) == 0
    version = current(shelf).version
    error = refused(altered(network, one_bit))
    assert f"task 0: task0.bin differs from version {version}" in error
    assert current(shelf).version == version


def another_bias(network: Network) -> None:
    network.head(0).bias[..., 0] += 1


def flip_a_sign(network: Network) -> None:
    layer = next(module for module in network.body.modules() if isinstance(module, MaskedLayer))
    mask = layer.mask(0)
    place = tuple(int(number) for number in mask.nonzero()[0])
    layer.signs[place] = ~layer.signs[place]


@pytest.mark.parametrize("candidates", [None, 1])
def test_signs_that_changed_are_refused(
    candidates: int | None, publish: Publish, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with a cascade, where answers cannot be compared to the bit."""
    chosen = Cascade(candidates=candidates, agreement=None, images=0)
    monkeypatch.setattr(exporter, "choose_cascade", lambda *_: chosen)
    network = learned("sup", "convnet", SIZES)
    assert publish(network) == 0
    error = refused(altered(network, flip_a_sign))
    assert "all tasks: shared.bin differs from version" in error


def test_a_bundle_with_fewer_tasks_is_refused(publish: Publish, refused: Callable[..., str]) -> None:
    network = learned("hat", "convnet", SIZES)
    assert publish(with_another_task(network)) == 0
    assert "has tasks that the new bundle lacks or has in another order" in refused(network)


def test_a_bundle_with_fewer_precisions_is_refused(publish: Publish, refused: Callable[..., str]) -> None:
    network = learned("hat", "convnet", SIZES)
    assert publish(network, "--precision", "int8") == 0
    assert "has int8; the new bundle has fp32" in refused(with_another_task(network), "--precision", "fp32")


def test_precisions_default_to_those_of_the_shelf(publish: Publish, shelf: Shelf) -> None:
    network = learned("hat", "convnet", SIZES)
    assert publish(network) == 0
    assert current(shelf).precisions == ("fp32",)
    assert publish(network, "--precision", "int8") == 0
    assert publish(with_another_task(network)) == 0
    assert current(shelf).precisions == ("fp32", "int8")
    assert len(current(shelf).tasks) == 3


def test_scores_that_changed_are_refused(publish: Publish, refused: Callable[..., str]) -> None:
    network = learned("hat", "convnet", SIZES)
    assert publish(network) == 0
    grown = with_another_task(network)
    decider = decider_for(grown)
    first, *others = decider.rule.tasks
    moved = TaskRule.fit(np.array(first.own_scores) + 0.01, first.classes)
    rule = decider.rule.model_copy(update={"tasks": (moved, *others)})
    error = refused(grown, decider=replace(decider, rule=rule))
    assert "task 0: its stored scores differ from those of version" in error


def test_another_decision_is_refused_by_its_name(publish: Publish, refused: Callable[..., str]) -> None:
    network = learned("hat", "convnet", SIZES)
    assert publish(network) == 0
    error = refused(network, decider=decider_for(network, "paper"))
    assert "decides by mahalanobis, the new bundle by paper; allowed: --decision mahalanobis or --decision pa" in error
    assert "by mahalanobis (--decision paper publishes the other one)" in error
    # What --force allows is another matter.
    assert "decides by mahalanobis" in refused(network, "--force", decider=decider_for(network, "paper"))


def test_the_decision_of_a_single_task_gives_way_to_the_choice_of_the_run(
    publish: Publish, shelf: Shelf, capsys: pytest.CaptureFixture[str]
) -> None:
    network = learned("hat", "convnet", (3,))
    assert publish(network) == 0
    # The same lesson with another decision is no evidence: it is published as served so far.
    assert publish(network, decider=decider_for(network, "paper")) == 2
    assert "published as served so far, by mahalanobis" in capsys.readouterr().err
    grown = with_another_task(network)
    assert publish(grown, decider=decider_for(grown, "paper")) == 0
    assert load_bundle(shelf.folder / "current").rule.score == "paper"
    printed = capsys.readouterr().err
    assert "decides by mahalanobis, chosen with a single task; the run decides by paper now" in printed
    assert "(--decision mahalanobis keeps the other one)" in printed
    assert "validation images of earlier tasks, " in printed
    # With two tasks, the choice stays.
    more = with_another_task(grown)
    assert publish(more, decider=decider_for(more)) == 2


def test_another_decision_for_a_single_task_has_to_keep_its_images_known(
    publish: Publish, refused: Callable[..., str], shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = learned("hat", "convnet", (3,))
    assert publish(network) == 0

    def decide_strictly(outputs: Outputs, rule: Rule) -> Verdicts:
        verdicts = decide(outputs, rule)
        return verdicts if rule.score != "paper" else verdicts._replace(known=verdicts.known & False)

    monkeypatch.setattr(publishing, "decide", decide_strictly)
    grown = with_another_task(network)
    assert "known images would be called unknown" in refused(grown, decider=decider_for(grown, "paper"))
    # A named decision allows no more.
    named = refused(grown, "--decision", "paper", decider=decider_for(grown, "paper"))
    assert "known images would be called unknown" in named
    assert publish(grown, "--force", decider=decider_for(grown, "paper")) == 0


def test_another_decision_that_is_named_is_published_with_what_it_changes(
    publish: Publish, refused: Callable[..., str], shelf: Shelf, capsys: pytest.CaptureFixture[str]
) -> None:
    network = learned("hat", "convnet", SIZES)
    assert publish(network) == 0
    before = shelf.current()
    assert before is not None
    grown, chosen = with_another_task(network), ("--decision", "paper")
    # The networks of earlier tasks are compared all the same.
    moved = altered(network, another_bias)
    assert "task 0 gives other logits" in refused(moved, *chosen, decider=decider_for(moved, "paper"))
    capsys.readouterr()
    assert publish(grown, *chosen, decider=decider_for(grown, "paper")) == 0
    assert load_bundle(shelf.folder / "current").rule.score == "paper"
    evidence = evidence_for(grown, 20)
    earlier = evidence.pixels[evidence.tasks < len(SIZES)]
    answers = []
    for place in (before, shelf.folder / "current"):
        (outputs,) = opened.open_written(place, "fp32").run([opened.GraphQuery(earlier)])
        answers.append(decide(outputs, load_bundle(place).rule))
    old, new = answers
    assert (
        f"note: fp32: of {len(earlier)} validation images of earlier tasks, "
        f"{(old.class_id != new.class_id).sum()} get another label, "
        f"{(old.known & ~new.known).sum()} of {old.known.sum()} known ones become unknown, "
        f"{(new.known & ~old.known).sum()} unknown ones become known"
    ) in capsys.readouterr().err


def test_answers_that_change_without_a_weight_are_refused(publish: Publish, refused: Callable[..., str]) -> None:
    network = learned("hat", "convnet", SIZES)
    assert publish(network) == 0
    grown = with_another_task(network)
    grown.config = replace(grown.config, mean=grown.config.mean + 1e-3)
    assert "fp32: task 0 gives other logits than in " in refused(grown)


def test_large_bundles_are_compared_task_by_task(
    publish: Publish, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = learned("hat", "convnet", SIZES)
    assert publish(network) == 0

    def whole_session(*_: object) -> None:
        raise AssertionError("opened whole")

    place = shelf.current()
    assert place is not None
    graph = onnx.load(place / "model.fp32.onnx", load_external_data=False).graph
    # The limit makes the new bundle large, but not the old one.
    monkeypatch.setattr(opened, "LARGE", sum(math.prod(tensor.dims) for tensor in graph.initializer) + 1)
    monkeypatch.setattr(opened, "whole_session", whole_session)
    assert publish(with_another_task(network)) == 0


def test_known_images_that_would_be_refused_are_a_refusal_unless_forced(
    publish: Publish, refused: Callable[..., str], shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = learned("hat", "convnet", SIZES)
    assert publish(network) == 0

    def decide_strictly(outputs: Outputs, rule: Rule) -> Verdicts:
        verdicts = decide(outputs, rule)
        return verdicts if len(rule.tasks) == len(SIZES) else verdicts._replace(known=verdicts.known & False)

    monkeypatch.setattr(publishing, "decide", decide_strictly)
    grown = with_another_task(network)
    assert "known images would be called unknown; allowed: a share of 0.05, or --force" in refused(grown)
    assert publish(grown, "--force") == 0
    assert len(current(shelf).tasks) == 3


def test_a_current_bundle_that_cannot_be_read_is_not_forgotten(
    publish: Publish, refused: Callable[..., str], shelf: Shelf
) -> None:
    network = learned("hat", "convnet", SIZES)
    assert publish(network) == 0
    place = shelf.current()
    assert place is not None
    part = place / "task1.fp32.bin"
    content = part.read_bytes()
    part.write_bytes(content[:-1])
    assert "task1.fp32.bin: corrupt" in refused(with_another_task(network))
    part.write_bytes(content)
    (place / "rule.json").unlink()
    assert "the current bundle cannot be compared with" in refused(with_another_task(network))


def test_a_failed_verification_publishes_nothing(
    publish: Publish, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    network = learned("hat", "convnet", SIZES)
    assert publish(network) == 0
    monkeypatch.setattr(parity, "ALLOWED", 0.0)
    assert "task 0, logits, batch 1" in refused(with_another_task(network))


def test_with_a_cascade_a_task_is_still_added(publish: Publish, shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a cascade a task may see an image in fewer rotations than before; its weights stay the same."""
    network = learned("hat", "convnet", SIZES)
    assert publish(network) == 0
    monkeypatch.setattr(exporter, "choose_cascade", lambda *_: Cascade(candidates=1, agreement=1.0, images=1000))
    assert publish(with_another_task(network)) == 0
    manifest = current(shelf)
    assert manifest.cascade.candidates == 1
    assert [task.unchanged for task in manifest.tasks] == [True, True, False]


@pytest.mark.parametrize(("lost", "refused"), [(0, False), (50, False), (60, False), (75, True), (1000, True)])
def test_known_images_may_become_unknown_by_chance_only(
    lost: int, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Thresholds move a little with every task; a share that is certainly above alpha is refused unless allowed."""
    network = learned("hat", "convnet", SIZES)
    bundles = []
    for number, step in enumerate((network, with_another_task(network))):
        folder = put_run(monkeypatch, tmp_path / "run", run_of(step))
        assert main([str(folder), "--out", str(tmp_path / f"bundle{number}")]) == 0
        bundles.append(load_bundle(tmp_path / f"bundle{number}"))
    evidence = evidence_for(network, 1000)

    def decided(known: np.ndarray) -> SimpleNamespace:
        return SimpleNamespace(known=known, class_id=np.zeros(len(known), int))

    verdicts = [np.ones(1000, bool), np.arange(1000) >= lost] * 2
    monkeypatch.setattr(publishing, "decide", lambda *_: decided(verdicts.pop(0)))
    if refused:
        with pytest.raises(PublishError, match=f"{lost} of 1000 known images would be .*; allowed: a share of 0.05"):
            check_remembers(*bundles, evidence)
    check_remembers(*bundles, evidence, Allowed(unknown=refused))
    assert f"0 get another label, {lost} of 1000 known ones become unknown" in capsys.readouterr().err
