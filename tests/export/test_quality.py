"""A run that does not work is exported only by force, and its bundle records that."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest

from export import cli
from export.__main__ import main
from export.graph.evidence import Evidence
from serving.bundle.layout import CARD
from serving.bundle.manifest import load_bundle
from serving.bundle.model import BundleModel
from serving.bundle.run_verdict import PartVerdict, RunVerdict, summarise
from serving.inference.answers import AnswerFormatter, PredictionOptions, describe
from tests.export.conftest import Exported
from tests.export.networks import GOOD, decider_for, evidence_for, learned, put_run, run_of
from tests.helpers import use_tiny_preset
from training.data.datasets import SOURCES

BAD = PartVerdict(grade="not working", numbers="TP 24.9 % of 361 test images, guessing 25.2 %")


def judged(folder: Path, verdict: RunVerdict | None) -> None:
    """Change the verdict in the metrics of a run."""
    path = folder / "metrics.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "verdict": verdict and verdict.model_dump()}))


@pytest.mark.parametrize("part", ["wp", "tp", "unknown"])
def test_a_run_that_does_not_work_is_refused_in_one_line(
    part: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = {name: getattr(GOOD, name) for name in ("wp", "tp", "unknown")} | {part: BAD}
    judged(run, summarise(**parts))
    out = tmp_path / "bundle"
    assert main([str(run), "--out", str(out)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {run}: Does not work here: ")
    assert BAD.numbers in line
    assert "--force" in line
    assert not out.exists()


def test_the_command_on_the_card_writes_the_same_bundle_again(
    tiny_hat: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_tiny_preset(monkeypatch)
    options = ["--decision", "paper", "--cascade", "off", "--force", "--precision", "int8"]
    assert main([str(tiny_hat), "--out", str(tmp_path / "first"), *options]) == 0
    first = load_bundle(tmp_path / "first")
    (command,) = re.findall(r"^openworld (export .*)$", (first.path / CARD).read_text(), re.MULTILINE)
    assert command == "export RUN --out BUNDLE --precision int8 --cascade off --decision paper --force"
    places = {"RUN": str(tiny_hat), "BUNDLE": str(tmp_path / "second")}
    words = [places.get(word, word) for word in shlex.split(command)]
    assert cli.main([word for word in words if word != "--force"]) == 2, "it was needed"
    assert cli.main(words) == 0
    assert load_bundle(tmp_path / "second").manifest.version == first.manifest.version


def test_force_that_is_not_needed_changes_nothing(run: Path, tmp_path: Path) -> None:
    for name, options in (("plain", []), ("forced", ["--force"])):
        assert main([str(run), "--out", str(tmp_path / name), *options]) == 0
    plain, forced = (load_bundle(tmp_path / name).manifest for name in ("plain", "forced"))
    assert plain.version == forced.version
    assert forced.origin is not None
    assert forced.origin.export == ()


def test_by_force_every_answer_and_the_description_have_the_warning(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    judged(run, summarise(GOOD.wp, BAD, GOOD.unknown))
    out = tmp_path / "bundle"
    assert main([str(run), "--out", str(out), "--force"]) == 0
    assert f"note: forced: Does not work here: task prediction ({BAD.numbers})." in capsys.readouterr().err
    model = BundleModel.load(out, provider="cpu")
    options = PredictionOptions.for_model(model)
    verdicts = model.predict(model.bundle.golden.pixels[:1])
    fields = AnswerFormatter(model.manifest).fields(verdicts, 0, options)
    assert fields["warning"] == f"Does not work here: task prediction ({BAD.numbers})."
    assert describe(model).verdict.tp == BAD
    assert "verdict" not in model.manifest.metrics


@pytest.mark.parametrize("grade", ["weak", "not measured"])
def test_a_weak_run_and_one_that_was_not_measured_need_no_force(grade: str, run: Path, tmp_path: Path) -> None:
    weak = PartVerdict.model_validate({"grade": grade, "numbers": "TP 60 %"})
    judged(run, summarise(weak, weak, weak))
    assert main([str(run), "--out", str(tmp_path / "bundle")]) == 0
    model = BundleModel.load(tmp_path / "bundle", provider="cpu")
    assert (model.manifest.verdict.tp, model.manifest.verdict.warning) == (weak, None)


def test_metrics_without_a_verdict_are_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    judged(run, None)
    assert main([str(run), "--out", str(tmp_path / "bundle")]) == 2
    assert (
        f"no verdict on the run; measure it again with `openworld fit --out {run} --resume`" in capsys.readouterr().err
    )


def test_a_run_that_is_exported_by_another_decision_is_measured_again(
    exported_hat: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_tiny_preset(monkeypatch)
    arguments = [str(exported_hat.folder), "--decision", "paper", "--force"]
    assert main([*arguments, "--out", str(tmp_path / "again")]) == 0
    again = load_bundle(tmp_path / "again").manifest
    chosen = exported_hat.bundle.manifest
    assert (again.metrics["decision"], again.decision) == ("paper", "paper")
    assert again.metrics["nats"] != chosen.metrics["nats"]
    assert "measuring the run again" in capsys.readouterr().err
    # Without test images nothing is known of this decision, and nothing is claimed.
    monkeypatch.delitem(SOURCES, "tiny")
    assert main([*arguments, "--out", str(tmp_path / "gone")]) == 0
    gone = load_bundle(tmp_path / "gone").manifest
    assert (gone.metrics, gone.verdict.tp.grade) == ({}, "not measured")
    assert f"measured with decision {chosen.decision} only" in gone.verdict.summary


def test_another_decision_without_images_does_not_hide_what_does_not_work(
    exported_hat: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_tiny_preset(monkeypatch)
    monkeypatch.delitem(SOURCES, "tiny")
    folder = shutil.copytree(exported_hat.folder, tmp_path / "run")
    judged(folder, summarise(GOOD.wp, BAD, GOOD.unknown))
    arguments = [str(folder), "--decision", "paper", "--out", str(tmp_path / "bundle")]
    assert main(arguments) == 2
    assert BAD.numbers in capsys.readouterr().err
    assert main([*arguments, "--force"]) == 0
    verdict = load_bundle(tmp_path / "bundle").manifest.verdict
    assert [part.grade for part in verdict.parts.values()] == ["not measured", "not working", "not measured"]
    assert verdict.warning is not None
    assert BAD.numbers in verdict.warning


def test_another_decision_of_a_run_without_images_is_refused_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = learned("hat", "convnet", (2, 3))
    evidence: Evidence = evidence_for(network)
    assert len(np.unique(evidence.class_ids)) == 2
    folder = put_run(monkeypatch, tmp_path / "run", run_of(network, decider_for(network, "paper")), evidence)
    assert main([str(folder), "--out", str(tmp_path / "bundle")]) == 0
    assert load_bundle(tmp_path / "bundle").manifest.verdict == GOOD
