"""`python -m export`: from a run to a bundle that the server accepts."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch

from export import exporter
from export.__main__ import main
from export.checks import parity
from export.checks.parity import ALLOWED
from export.graph.evidence import Evidence
from export.graph.session import run_graph, whole_session
from export.graph.writer import OPSET
from serving.bundle.decision import FEATURES, NETWORK_NAMES, OUTPUT_NAMES, complete, decide
from serving.bundle.layout import CARD, GOLDEN, MANIFEST, RULE, graph_name, part_name
from serving.bundle.manifest import INPUT_NAME, load_bundle
from serving.bundle.model import BundleModel
from serving.bundle.own_scores import threshold
from serving.bundle.sections import Cascade
from tests.export.conftest import Exported
from tests.export.networks import evidence_for, learned, put_run, run_of
from tests.helpers import (
    LABELS,
    SPEC,
    kill_at_save,
    tiny_source,
    use_tiny_preset,
)
from training import fit
from training.store.checkpoint import CONFIG, CURRENT


def session_of(exported: Exported) -> ort.InferenceSession:
    return whole_session(exported.bundle.path, "fp32")


def test_the_manifest_describes_the_run(exported: Exported) -> None:
    manifest, run = exported.bundle.manifest, exported.run
    assert manifest.name == f"digits-{run.config.method}"
    assert (manifest.method, manifest.preset, manifest.seed) == (run.config.method, "digits", 0)
    assert manifest.image == SPEC
    assert manifest.labels == LABELS
    assert [(task.first_class_id, task.labels) for task in manifest.tasks] == [(0, LABELS[:2]), (2, LABELS[2:])]
    for task, info in enumerate(manifest.tasks):
        head = run.network.head(task)
        assert (info.calibration.scale, info.calibration.shift) == (head.scale.item(), head.shift.item())
    assert (manifest.alpha, manifest.threshold) == (0.05, threshold(0.05))
    measured = json.loads((exported.folder / "metrics.json").read_text())
    assert {**manifest.metrics, "verdict": manifest.verdict.model_dump()} == measured
    assert manifest.versions["opset"] == str(OPSET)
    assert manifest.versions["torch"] == torch.__version__.split("+")[0]
    assert manifest.precisions == ("fp32",)
    assert manifest.verification.keys() == {"fp32"}
    differences = {name for name in manifest.verification["fp32"] if "difference" in name and "absolute" not in name}
    assert max(manifest.verification["fp32"][name] for name in differences) <= ALLOWED
    assert manifest.cascade == Cascade(candidates=None, agreement=None, images=0)
    assert manifest.before is None
    assert not any(task.unchanged for task in manifest.tasks)
    assert datetime.fromisoformat(manifest.created).tzinfo is not None


def test_the_bundle_holds_its_files_and_no_others(exported: Exported) -> None:
    files = {path.name: path.stat().st_size for path in exported.bundle.path.iterdir()}
    owners = {"task0", "task1"} | ({"shared"} if exported.run.config.method == "sup" else set())
    parts = {part_name(owner) for owner in owners} | {part_name(owner, "fp32") for owner in owners - {"shared"}}
    assert files.keys() == {MANIFEST, RULE, GOLDEN, CARD, graph_name("fp32"), *parts}
    named = [("task0.bin", "task0.fp32.bin"), ("task1.bin", "task1.fp32.bin")]
    assert [task.parts for task in exported.bundle.manifest.tasks] == named
    manifest_size = files.pop(MANIFEST)
    assert manifest_size > 0
    assert {name: info.size for name, info in exported.bundle.manifest.files.items()} == files
    assert exported.bundle.rule == exported.run.rule


def test_the_model_card_describes_the_run(exported: Exported) -> None:
    card = (exported.bundle.path / CARD).read_text()
    manifest = exported.bundle.manifest
    assert f"openworld fit --method {manifest.method} --out RUN" in card
    assert "| source | tiny |" in card
    assert f"| torch | {manifest.versions['torch']} |" in card
    # Places on the machine that learned it are nobody's business.
    assert str(exported.folder) not in card
    # The card is part of what the version stands for.
    assert manifest.files[CARD].sha256 == hashlib.sha256(card.encode()).hexdigest()


def test_the_server_takes_the_bundle(exported: Exported) -> None:
    model = BundleModel.load(exported.bundle.path, provider="cpu")
    assert model.bundle.manifest.version == exported.bundle.manifest.version


def test_the_graph_is_valid_with_a_dynamic_batch_and_the_agreed_names(exported: Exported) -> None:
    path = exported.bundle.path / graph_name("fp32")
    onnx.checker.check_model(path, full_check=True)
    model = onnx.load(path)
    (pixels,) = model.graph.input
    assert pixels.name == INPUT_NAME
    assert pixels.type.tensor_type.elem_type == onnx.TensorProto.UINT8
    batch, *shape = pixels.type.tensor_type.shape.dim
    assert batch.dim_param
    assert [dimension.dim_value for dimension in shape] == list(SPEC.shape)
    assert [output.name for output in model.graph.output] == [*OUTPUT_NAMES, FEATURES]
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    assert (model.producer_name, model.producer_version) == (
        "openworld",
        exported.bundle.manifest.versions["openworld"],
    )
    assert (metadata["name"], metadata["precision"]) == (exported.bundle.manifest.name, "fp32")
    assert json.loads(metadata["tasks"]) == [list(LABELS[:2]), list(LABELS[2:])]


def test_the_graph_answers_test_images_as_the_network_does(exported: Exported) -> None:
    pixels = tiny_source().test.pixels
    rule = exported.bundle.rule
    wanted = complete(exported.run.outputs(pixels, torch.device("cpu")), rule)
    got = run_graph(session_of(exported), pixels)
    for name in OUTPUT_NAMES:
        # Tasks with so few images are overconfident: a probability may be 1 for all images.
        assert name not in NETWORK_NAMES or np.ptp(wanted[name], axis=0).min() > 0
        np.testing.assert_allclose(got[name], wanted[name], rtol=ALLOWED, atol=ALLOWED)
    assert decide(got, rule).class_id.tolist() == decide(wanted, rule).class_id.tolist()


def test_batches_of_one_and_five_agree(exported: Exported) -> None:
    session, pixels = session_of(exported), tiny_source().test.pixels[::4][:5]
    together = run_graph(session, pixels)
    for number in range(5):
        alone = run_graph(session, pixels[number : number + 1])
        for name in OUTPUT_NAMES:
            np.testing.assert_allclose(alone[name][0], together[name][number], rtol=ALLOWED, atol=ALLOWED)


def test_an_answer_does_not_depend_on_the_other_images_of_the_batch(exported: Exported) -> None:
    session, pixels = session_of(exported), tiny_source().test.pixels
    beside = [run_graph(session, np.concatenate([pixels[:1], pixels[start : start + 4]])) for start in (4, 12, 20)]
    beside.append(run_graph(session, np.concatenate([pixels[:1], np.full_like(pixels[:4], 255)])))
    for other in beside[1:]:
        for name in OUTPUT_NAMES:
            assert np.array_equal(other[name][0], beside[0][name][0])
            assert name not in NETWORK_NAMES or not np.array_equal(other[name][1:], beside[0][name][1:])


def test_golden_outputs_equal_the_outputs_of_the_graph(exported: Exported) -> None:
    golden = exported.bundle.golden
    got = run_graph(session_of(exported), golden.pixels)
    assert len(golden.pixels) == 8
    # Whether a thread flushes denormal numbers to zero depends on what it ran before.
    denormal = float(np.finfo(np.float32).tiny)
    for name in OUTPUT_NAMES:
        np.testing.assert_allclose(golden.outputs["fp32"][name], got[name], rtol=0, atol=denormal)


def test_a_bundle_names_no_path_of_this_machine(exported: Exported) -> None:
    here = str(Path(__file__).resolve().parents[2]).encode()
    for path in exported.bundle.path.iterdir():
        content = path.read_bytes()
        for place in (b"site-packages", here, str(exported.folder).encode()):
            assert place not in content, (path.name, place)


def test_exporting_a_run_again_gives_the_same_version(exported_hat: Exported, tmp_path: Path) -> None:
    assert main([str(exported_hat.folder), "--out", str(tmp_path / "again"), "--force"]) == 0
    again = load_bundle(tmp_path / "again")
    assert again.manifest.version == exported_hat.bundle.manifest.version
    assert again.graph("fp32") == exported_hat.bundle.graph("fp32")


def test_exporting_over_a_bundle_of_the_same_run_changes_nothing(exported_hat: Exported, tmp_path: Path) -> None:
    place = Path(shutil.copytree(exported_hat.bundle.path, tmp_path / "bundle"))
    before = {path.name: path.read_bytes() for path in place.iterdir()}
    assert main([str(exported_hat.folder), "--out", str(place), "--force"]) == 0
    assert {path.name: path.read_bytes() for path in place.iterdir()} == before


def assert_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], out: Path) -> None:
    assert main([*arguments, "--out", str(out), "--force"]) == 2
    error = capsys.readouterr().err
    assert error.splitlines()[-1].startswith("error: ")
    assert message in error


def test_a_run_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused([str(tmp_path / "none")], f"{tmp_path / 'none'}: not a run", capsys, tmp_path / "bundle")
    assert list(tmp_path.iterdir()) == []


def test_an_unfinished_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_tiny_preset(monkeypatch)
    kill_at_save(monkeypatch, 6, written=True)
    assert fit.main(["--out", str(tmp_path / "run")]) == 130
    capsys.readouterr()
    message = f"{tmp_path / 'run'}: 1 of 2 tasks are learned; finish it with"
    assert_refused([str(tmp_path / "run")], message, capsys, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


def copy_of_run(exported: Exported, folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in names:
        (folder / name).write_bytes((exported.folder / name).read_bytes())
    return folder


def test_a_run_that_was_never_measured_is_refused(
    exported_hat: Exported, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy_of_run(exported_hat, tmp_path / "run", CONFIG, CURRENT)
    assert_refused([str(folder)], f"{folder}: no metrics.json", capsys, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


def test_a_run_with_corrupt_metrics_is_refused_by_the_name_of_their_file(
    exported_hat: Exported, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy_of_run(exported_hat, tmp_path / "run", CONFIG, CURRENT)
    for content in ("{", "5"):
        (folder / "metrics.json").write_text(content)
        message = f"{folder / 'metrics.json'}: not a JSON object: "
        assert_refused([str(folder)], message, capsys, tmp_path / "bundle")


def test_a_disk_that_fails_is_one_line_that_names_the_file(
    exported_hat: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def write_graph(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "task0.fp32.bin")

    monkeypatch.setattr(exporter, "write_graph", write_graph)
    message = "error: task0.fp32.bin: No space left on device\n"
    assert_refused([str(exported_hat.folder)], message, capsys, tmp_path / "bundle")


def test_a_mistake_in_the_program_is_not_taken_for_the_users(
    exported_hat: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_graph(*_: object) -> None:
        raise ValueError("zip() argument 2 is shorter than argument 1")

    monkeypatch.setattr(exporter, "write_graph", write_graph)
    with pytest.raises(ValueError, match=r"zip\(\)"):
        main([str(exported_hat.folder), "--out", str(tmp_path / "bundle"), "--force"])


def test_a_decision_that_a_run_cannot_have_is_refused(
    exported_hat: Exported, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(exported_hat.folder), "--decision", "paper+c"]
    assert_refused(arguments, f"{exported_hat.folder}: decision paper+c needs", capsys, tmp_path / "bundle")


def test_tasks_whose_images_are_gone_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    network = learned("hat", "convnet")
    everything = evidence_for(network)
    left = everything.tasks != 1
    evidence = Evidence(
        everything.pixels[left], everything.tasks[left], everything.class_ids[left], ("task 1: /photos is gone",)
    )
    folder = put_run(monkeypatch, tmp_path / "run", run_of(network), evidence)
    monkeypatch.setattr(parity, "AGREEING", {})
    monkeypatch.setattr(parity, "AUROC_CHANGE", 2)
    assert main([str(folder), "--out", str(tmp_path / "bundle"), "--precision", "fp16"]) == 0
    assert capsys.readouterr().err == "note: no validation images of task 1: /photos is gone\n"
    checked = load_bundle(tmp_path / "bundle").manifest.verification["fp16"]
    assert [checked[f"images_of_task_{task}"] for task in range(3)] == [14, 0, 13]


def test_images_that_are_more_than_enough_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    network = learned("hat", "convnet")
    evidence = replace(evidence_for(network), left_out=60)
    folder = put_run(monkeypatch, tmp_path / "run", run_of(network), evidence)
    assert main([str(folder), "--out", str(tmp_path / "bundle")]) == 0
    assert capsys.readouterr().err == "note: 40 of 100 validation images were used, evenly by task\n"


def test_a_run_with_a_corrupt_checkpoint_is_refused(
    exported_hat: Exported, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy_of_run(exported_hat, tmp_path / "run", CONFIG, "metrics.json")
    (folder / CURRENT).write_bytes(b"rubbish")
    assert_refused([str(folder)], str(folder / CURRENT), capsys, tmp_path / "bundle")


def test_a_folder_that_is_no_bundle_is_not_replaced(
    exported_hat: Exported, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("years of work")
    assert_refused([str(exported_hat.folder)], "exists and is not a bundle", capsys, tmp_path / "thesis")
    assert (tmp_path / "thesis" / "chapter.tex").read_text() == "years of work"
