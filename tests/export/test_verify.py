"""A graph whose outputs differ from the network's is not exported, and a changed bundle is detected."""

from __future__ import annotations

import copy
import io
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from onnx import numpy_helper

from export import exporter
from export.__main__ import main
from export.checks import parity
from export.checks.parity import ALLOWED, BATCHES, ParityError, synthetic_images, verify, verify_precision
from export.graph import session as opened
from export.graph.assemble import GraphPlan, write_graph
from export.graph.cascade import rotated_outputs, seen_again
from export.graph.session import GraphQuery, WholeGraph, run_graph, whole_session
from export.inspect import main as inspect_command
from export.verify import main as verify_command
from models.network import Network
from serving.bundle.decision import FEATURES, OUTPUT_NAMES, Rule, TaskRule
from serving.bundle.layout import GOLDEN, graph_name
from serving.bundle.manifest import FORMAT, load_bundle
from serving.bundle.sections import Cascade, ImageSpec
from serving.predict import main as predict_command
from tests.export.conftest import Exported
from tests.export.networks import decider_for, evidence_for, learned, put_run, run_of
from tests.helpers import SPEC
from tests.helpers_serving import edit_manifest, reseal

PIXELS = synthetic_images(SPEC, 9)
COMPARED = (*OUTPUT_NAMES, FEATURES)
OFF = Cascade(candidates=None, agreement=None, images=0)


def changed(network: Network, name: str, by: float) -> Network:
    """A copy of the network with a number added to one tensor."""
    other = copy.deepcopy(network)
    with torch.no_grad():
        other.state_dict(keep_vars=True)[name].add_(by)
    return other


def check(exported: Exported, network: Network | None = None) -> dict[str, float]:
    results = WholeGraph(exported.bundle.path, "fp32").run([GraphQuery(PIXELS, size) for size in BATCHES])
    answers = dict(zip(BATCHES, results, strict=True))
    return verify(network or exported.run.network, exported.run.decider, PIXELS, answers, OFF)


# ---- network against graph


def test_a_graph_of_this_network_passes_with_all_its_differences(exported: Exported) -> None:
    result = check(exported)
    differences = {f"{name}_difference_batch_{size}" for name in COMPARED for size in BATCHES}
    absolute = {f"{name}_absolute_difference_batch_{size}" for name in COMPARED for size in BATCHES}
    labels = {f"label_agreement_batch_{size}" for size in BATCHES}
    assert BATCHES == (1, 7)
    assert result.keys() == differences | absolute | labels | {"images", "allowed"}
    assert all(0 <= result[name] <= ALLOWED for name in differences)
    assert all(result[name] >= result[name.replace("_absolute", "")] for name in absolute)
    assert all(result[name] == 1 for name in labels)
    assert (result["images"], result["allowed"]) == (9, ALLOWED)


@pytest.mark.parametrize(
    ("tensor", "task", "output", "limit"),
    [
        ("heads.0.bias", 0, "logits", 0.0001),
        ("heads.1.bias", 1, "logits", 0.0001),
        ("detectors.1.scores.deep.means", 1, "distances", 0.001),
        ("detectors.1.scores.mahalanobis.gain", 1, "features", 0.001),
    ],
)
def test_a_graph_of_another_network_is_refused_by_task_output_and_limit(
    tensor: str, task: int, output: str, limit: float, exported_hat: Exported
) -> None:
    message = rf"task {task}, {output}, batch 1: max \|difference\| / \(1 \+ \|value\|\) is .* > {limit:g}"
    with pytest.raises(ParityError, match=message):
        check(exported_hat, changed(exported_hat.run.network, tensor, 100.0))


def test_a_network_with_nan_outputs_is_refused(exported_hat: Exported) -> None:
    with pytest.raises(ParityError, match=r"task 1, logits, batch 1: .* is nan > 0.0001"):
        check(exported_hat, changed(exported_hat.run.network, "heads.1.bias", float("nan")))


def test_labels_that_differ_are_refused_even_if_every_difference_is_allowed(
    exported_hat: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parity, "ALLOWED", float("inf"))
    contrary = copy.deepcopy(exported_hat.run.network)
    with torch.no_grad():
        for task in range(2):
            contrary.head(task).weight.neg_()
            contrary.head(task).bias.neg_()
    with pytest.raises(
        ParityError,
        match=r"batch 1: 9 of 9 labels differ between network and graph, those of the network are of task .* 0$",
    ):
        check(exported_hat, contrary)


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_synthetic_images_are_many_different_ones_and_the_same_each_time(mode: str) -> None:
    spec = ImageSpec(height=8, width=6, mode=mode)  # type: ignore[arg-type]
    images = synthetic_images(spec, 12)
    assert images.dtype == np.uint8
    assert images.shape == (12, *spec.shape)
    assert len({image.tobytes() for image in images}) == 12
    assert np.array_equal(images, synthetic_images(spec, 12))
    assert (images[0].max(), images[1].min()) == (0, 255)


# ---- the exporter writes nothing if a check fails


def tamper(
    patch: pytest.MonkeyPatch, precision: str, tensor: str, damage: Callable[[NDArray[Any]], NDArray[Any]]
) -> None:
    """Change one tensor of a graph as soon as it is written."""

    def write(folder: Path, bake: Any, plan: GraphPlan) -> None:
        write_graph(folder, bake, plan)
        if plan.precision != precision:
            return
        path = folder / graph_name(precision)
        model = onnx.load(path, load_external_data=False)
        found = next(constant for constant in model.graph.initializer if constant.name == tensor)
        place = {entry.key: entry.value for entry in found.external_data}
        values = numpy_helper.to_array(found, base_dir=str(folder))
        with (folder / place["location"]).open("r+b") as file:
            file.seek(int(place["offset"]))
            file.write(damage(values).astype(values.dtype).tobytes())

    patch.setattr(exporter, "write_graph", write)


def assert_nothing_is_written(arguments: list[str], place: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The error that the exporter prints."""
    place.mkdir()
    assert main([*arguments, "--out", str(place / "bundle")]) == 2
    assert list(place.iterdir()) == []
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    return error


def test_wrong_weights_are_refused(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tamper(monkeypatch, "fp32", "task1/body/1/0/weight", lambda weight: weight * 1.5)
    error = assert_nothing_is_written([str(run)], tmp_path / "place", capsys)
    assert error.startswith("error: task 1, logits, batch 1: max |difference| / (1 + |value|) is ")
    assert error.endswith(" > 0.0001\n")


def test_features_that_only_the_quarantine_reads_are_verified_too(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tamper(monkeypatch, "fp32", "task1/features/level", lambda level: level * 1.1)
    error = assert_nothing_is_written([str(run)], tmp_path / "place", capsys)
    assert error.startswith("error: task 1, features, batch 1: max |difference| / (1 + |value|) is ")


def test_a_graph_with_nan_outputs_is_not_written_as_a_bundle(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tamper(monkeypatch, "fp32", "task2/head/bias", lambda bias: bias * float("nan"))
    error = assert_nothing_is_written([str(run)], tmp_path / "place", capsys)
    assert "task 2, logits, batch 1" in error
    assert "is nan > 0.0001" in error


@pytest.mark.parametrize("large", [False, True])
def test_a_task_that_no_synthetic_image_makes_a_candidate_is_verified_all_the_same(
    large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    network = learned("hat", "convnet", (2,) * 8)
    outputs = rotated_outputs(network, decider_for(network), synthetic_images(SPEC, exporter.VERIFIED_IMAGES))
    never = int((~seen_again(outputs, 1, None).any(axis=0)).argmax())
    assert not seen_again(outputs, 1, None)[:, never].any()
    folder = put_run(monkeypatch, tmp_path / "run", run_of(network))
    monkeypatch.setattr(exporter, "choose_cascade", lambda *_: Cascade(candidates=1, agreement=1.0, images=1000))
    if large:
        monkeypatch.setattr(opened, "LARGE", 1)
    assert main([str(folder), "--out", str(tmp_path / "bundle")]) == 0
    assert load_bundle(tmp_path / "bundle").manifest.verification["fp32"]["logits_difference_all_turned"] <= ALLOWED
    capsys.readouterr()
    # Upright images are answered correctly; only the other three rotations are wrong.
    tamper(monkeypatch, "fp32", f"task{never}/head/weight", lambda weight: np.concatenate([weight[:1], weight[1:] + 9]))
    error = assert_nothing_is_written([str(folder)], tmp_path / "place", capsys)
    assert error.startswith(f"error: task {never}, logits, all turned: max |difference| / (1 + |value|) is ")


def keep_otherwise(patch: pytest.MonkeyPatch, precision: str, change: Callable[[NDArray[Any]], NDArray[Any]]) -> None:
    """Change a precision's golden task probabilities, so that they differ from the graph's."""

    def keep(self: exporter.Exporter, name: str, answers: Any) -> None:
        real(self, name, {**answers, "p_task": change(answers["p_task"])} if name == precision else answers)

    real = exporter.Exporter.keep
    patch.setattr(exporter.Exporter, "keep", keep)


@pytest.mark.parametrize("wrong", [np.inf, np.nan])
def test_golden_answers_that_are_not_finite_are_refused(
    wrong: float, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(parity, "AGREEING", {})
    keep_otherwise(monkeypatch, "fp16", lambda values: np.where(np.arange(len(values))[:, None] == 1, wrong, values))
    error = assert_nothing_is_written([str(run), "--precision", "fp16"], tmp_path / "place", capsys)
    assert error == "error: fp16: p_task of the golden images are not finite, so no server would start\n"


def test_a_bundle_that_a_server_would_not_accept_is_not_written(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keep_otherwise(monkeypatch, "fp32", lambda values: values + np.float32(0.1))
    error = assert_nothing_is_written([str(run)], tmp_path / "place", capsys)
    assert "model.fp32.onnx: p_task of the images in golden.npz" in error


def test_a_failed_export_leaves_the_bundle_that_was_there(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "place" / "bundle"
    assert main([str(run), "--out", str(out)]) == 0
    version = load_bundle(out).manifest.version
    tamper(monkeypatch, "fp32", "task1/body/1/0/weight", lambda weight: weight * 1.5)
    assert main([str(run), "--out", str(out)]) == 2
    assert [path.name for path in out.parent.iterdir()] == ["bundle"]
    load_bundle(out).check()
    assert load_bundle(out).manifest.version == version


def test_an_int8_graph_that_changes_answers_is_refused(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tamper(monkeypatch, "int8", "task0/head/weight", lambda weight: -3 * weight)
    tamper_error = assert_nothing_is_written([str(run), "--precision", "int8"], tmp_path / "place", capsys)
    assert tamper_error.startswith("error: int8: label agreement with fp32 is ")
    assert "% < 99%: " in tamper_error
    assert " of 40 images differ, of task " in tamper_error


@pytest.mark.parametrize("precision", ["int8", "fp16"])
def test_a_coarser_precision_is_refused_without_validation_images(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = put_run(monkeypatch, tmp_path / "run", run_of(learned("hat", "convnet")))
    error = assert_nothing_is_written([str(folder), "--precision", precision], tmp_path / "place", capsys)
    assert error == f"error: {precision}: no validation image is available to verify it; give their place with --data\n"


# ---- a coarser precision against fp32


RULE = Rule(tasks=(TaskRule.fit(np.linspace(-1, 1, 99), classes=2),) * 2)
EVIDENCE = evidence_for(learned("hat", "convnet", (2, 2)), 200)
ONE_TASK = replace(EVIDENCE, tasks=np.zeros(200, dtype=int))
"""Images of a single task, for which no ranking can be measured."""


@pytest.fixture(scope="module")
def outputs() -> dict[str, NDArray[Any]]:
    """Outputs for 200 known images; every second one belongs to the first task and has a clear class."""
    p_task = np.tile([[0.9, 0.1], [0.1, 0.9]], (100, 1)).astype(np.float32)
    within = np.tile([0.8, 0.2, 0.7, 0.3], (200, 1)).astype(np.float32)
    scores = np.tile([[0.0, 5.0], [5.0, 0.0]], (100, 1)).astype(np.float32)
    parts = (np.zeros((200, 4)), np.zeros((200, 4)), scores, p_task, within, within * p_task.repeat(2, axis=1))
    return dict(zip(OUTPUT_NAMES, parts, strict=True))


def test_agreement_is_counted(outputs: dict[str, NDArray[Any]]) -> None:
    got = {name: values.copy() for name, values in outputs.items()}
    got["probability"][:2] = got["probability"][:2, ::-1]
    result = verify_precision("int8", outputs, got, RULE, EVIDENCE)
    assert (result["images"], result["label_agreement"], result["unknown_agreement"]) == (200, 0.99, 1.0)
    assert (result["images_of_task_0"], result["images_of_task_1"]) == (100, 100)
    assert result["mean_task_auroc_change"] == result["largest_task_auroc_change"] == 0
    assert result["tasks_with_auroc"] == 2
    got["probability"][2] = got["probability"][2, ::-1]
    with pytest.raises(ParityError, match=r"is 98\.50% < 99%: 3 of 200 images differ, of task 0 \(2\), task 1 \(1\)"):
        verify_precision("int8", outputs, got, RULE, EVIDENCE)


def test_unknown_agreement_is_counted(outputs: dict[str, NDArray[Any]]) -> None:
    got = {name: values.copy() for name, values in outputs.items()}
    got["scores"][:6] = 1000
    assert verify_precision("fp16", outputs, got, RULE, ONE_TASK)["unknown_agreement"] == 0.97
    got["scores"][:7] = 1000
    with pytest.raises(ParityError, match=r"fp16: unknown agreement with fp32 is 96\.50% < 97%"):
        verify_precision("fp16", outputs, got, RULE, EVIDENCE)


def test_a_ranking_that_cannot_be_measured_is_reported_as_missing(
    outputs: dict[str, NDArray[Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    result = verify_precision("int8", outputs, outputs, RULE, ONE_TASK)
    assert result["tasks_with_auroc"] == 0
    assert "largest_task_auroc_change" not in result
    note = "note: int8: no AUROC was measured: that takes validation images of two tasks\n"
    assert capsys.readouterr().err == note


def test_a_ranking_that_changes_is_refused_even_if_every_answer_stays(outputs: dict[str, NDArray[Any]]) -> None:
    got = {name: values.copy() for name, values in outputs.items()}
    # Some images of other tasks get closer to the first task than its own images; another task still knows them.
    got["scores"][1:41:2, 0] = -9
    with pytest.raises(ParityError, match=r"int8: the AUROC of task 0 changes by -0\.\d+ from fp32; allowed 0\.01"):
        verify_precision("int8", outputs, got, RULE, EVIDENCE)


def test_a_task_that_gains_does_not_hide_one_that_loses(outputs: dict[str, NDArray[Any]]) -> None:
    before, after = ({name: values.copy() for name, values in outputs.items()} for _ in range(2))
    before["scores"][0:40:2, 1] = after["scores"][1:41:2, 0] = -9
    with pytest.raises(ParityError, match=r"int8: the AUROC of task 0 changes by -0\.2000 from fp32; allowed 0\.01"):
        verify_precision("int8", before, after, RULE, EVIDENCE)


# ---- a bundle that was written


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle in three precisions."""
    place, network = tmp_path_factory.mktemp("three"), learned("sup", "convnet")
    with pytest.MonkeyPatch.context() as patch:
        # The limits for int8 do not apply to random weights.
        patch.setattr(parity, "AGREEING", {"label_agreement": 0.5})
        patch.setattr(parity, "AUROC_CHANGE", 0.5)
        folder = put_run(patch, place / "run", run_of(network), evidence_for(network))
        assert main([str(folder), "--out", str(place / "bundle"), "--precision", "int8", "fp16"]) == 0
    return place / "bundle"


def test_all_precisions_are_verified_and_recorded(three: Path) -> None:
    manifest = load_bundle(three).manifest
    assert manifest.precisions == ("fp32", "int8", "fp16")
    assert manifest.tasks[1].parts == ("task1.bin", "task1.fp32.bin", "task1.int8.bin", "task1.fp16.bin")
    assert "logits_difference_batch_7" in manifest.verification["fp32"]
    for precision in ("int8", "fp16"):
        checked = manifest.verification[precision]
        assert checked["images"] == 40
        assert {"label_agreement", "unknown_agreement", "largest_task_auroc_change", "known_accepted"} <= checked.keys()
    assert manifest.verification["fp16"]["label_agreement"] == 1


def test_golden_answers_are_each_precisions_own(three: Path) -> None:
    golden = load_bundle(three).golden
    # The golden images of fp32 are the first of the verified images.
    verified = synthetic_images(SPEC, exporter.VERIFIED_IMAGES)
    for precision, question in (("fp32", (verified, 7)), ("int8", (golden.pixels,)), ("fp16", (golden.pixels,))):
        got = run_graph(whole_session(three, precision), *question)
        np.testing.assert_array_equal(golden.outputs[precision]["logits"], got["logits"][: len(golden.pixels)])
    assert not np.array_equal(golden.outputs["fp32"]["logits"], golden.outputs["int8"]["logits"])


def test_a_written_bundle_is_checked_again(three: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify_command([str(three)]) == 0
    printed = capsys.readouterr().out
    assert "20 checksums and 8 golden answers in fp32, int8, fp16 are right" in printed


@pytest.mark.parametrize("name", ["task1.int8.bin", "task0.bin", "shared.bin", "model.fp32.onnx", GOLDEN])
def test_one_wrong_bit_is_noticed(name: str, three: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damaged = Path(shutil.copytree(three, tmp_path / "bundle"))
    content = bytearray((damaged / name).read_bytes())
    content[len(content) // 2] ^= 1
    (damaged / name).write_bytes(bytes(content))
    assert verify_command([str(damaged)]) == 2
    assert f"{name}: corrupt: sha256" in capsys.readouterr().err


def with_golden_moved(bundle: Path, folder: Path, name: str, by: float) -> Path:
    """A copy of a bundle with a number added to its golden outputs."""
    damaged = Path(shutil.copytree(bundle, folder))
    with np.load(damaged / GOLDEN) as stored:
        arrays = dict(stored)
    arrays[name] = arrays[name] + np.float32(by)
    content = io.BytesIO()
    np.savez(content, **arrays)
    reseal(damaged, GOLDEN, content.getvalue())
    return damaged


@pytest.mark.parametrize(
    ("precision", "by", "right"),
    [("fp32", 0.01, False), ("int8", 0.01, False), ("fp16", 0.01, True), ("fp16", 0.05, False)],
)
def test_half_precision_may_round_otherwise_on_another_machine(
    precision: str, by: float, right: bool, three: Path, tmp_path: Path
) -> None:
    moved = with_golden_moved(three, tmp_path / "bundle", f"{precision}.p_task", by)
    assert verify_command([str(moved)]) == (0 if right else 2)


def test_golden_answers_that_the_graph_does_not_give_are_noticed(
    three: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = with_golden_moved(three, tmp_path / "bundle", "int8.p_task", 0.1)
    assert verify_command([str(damaged)]) == 2
    error = capsys.readouterr().err
    assert "model.int8.onnx: p_task of the images in golden.npz" in error
    assert " was recorded; difference 0.1 > " in error


def test_a_newer_bundle_is_refused(three: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newer = Path(shutil.copytree(three, tmp_path / "bundle"))
    edit_manifest(newer, format=FORMAT + 1)
    assert verify_command([str(newer)]) == 2
    assert f"format {FORMAT + 1}; this version reads format {FORMAT}" in capsys.readouterr().err


@pytest.mark.parametrize("command", [verify_command, inspect_command, predict_command])
def test_a_sparse_file_of_a_terabyte_is_refused_in_one_line(
    exported: Exported,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: Callable[[list[str]], int],
) -> None:
    bundle = Path(shutil.copytree(exported.bundle.path, tmp_path / "bundle"))
    with (bundle / GOLDEN).open("r+b") as file:
        file.truncate(2**40)
    assert command([str(bundle)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert "golden.npz: corrupt: 1099511627776 bytes; allowed: up to" in shown.err


def test_a_bundle_whose_name_would_control_the_terminal_is_escaped(
    exported: Exported, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = shutil.copytree(exported.bundle.path, tmp_path / "a\x1b[31mb")
    assert verify_command([str(bundle)]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert r"a\x1b[31mb: " in shown


def test_an_export_whose_folder_would_control_the_terminal_is_escaped(
    exported: Exported, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    written = SimpleNamespace(path=tmp_path / "a\x1b[31mb", manifest=exported.bundle.manifest)
    monkeypatch.setattr(exporter, "export", lambda *_, **__: written)
    assert main([str(exported.run.folder), "--out", str(written.path)]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert r"a\x1b[31mb: " in shown
