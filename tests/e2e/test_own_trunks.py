"""Trunks that a user brings or that a run learns by itself: from images to answers, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from export.__main__ import main as export
from export.cli import main as openworld
from models.trunks import patches
from models.trunks.cache_settings import FOLDER_VARIABLE
from models.trunks.trunk import OWN_WEIGHTS
from serving.bundle.layout import MAPS
from serving.bundle.manifest import load_bundle
from serving.bundle.model import BundleModel
from tests.helpers import assert_same_tensors, raise_at_call, run_tensors
from training import fit
from training.evaluate import main as evaluate
from training.learn import pooled_learner
from training.store.checkpoint import read_config

pytestmark = pytest.mark.long

TASKS = "0,1; 2,3"


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER_VARIABLE, str(tmp_path_factory.mktemp("cache")))
        patch.setattr(patches, "SAMPLED", 5000)
        yield


def write_extractor(path: Path) -> Path:
    """A feature extractor that a user might bring: one convolution of 8x8 pixels with random filters."""
    weight = np.random.default_rng(0).normal(size=(24, 3, 8, 8)).astype(np.float32)
    nodes = [
        helper.make_node("Conv", ["images", "weight"], ["maps"], strides=[8, 8]),
        helper.make_node("Relu", ["maps"], ["positive"]),
        helper.make_node("Flatten", ["positive"], ["features"]),
    ]
    images = helper.make_tensor_value_info("images", TensorProto.FLOAT, ["n", 3, 32, 32])
    features = helper.make_tensor_value_info("features", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "mine", [images], [features], [numpy_helper.from_array(weight, "weight")])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), path)
    return path


# ---- patches


PATCHES = ["--preset", "digits", "--trunk", "patches", "--trunk-option", "count=40", "--tasks", TASKS, "--quick"]


@pytest.fixture(scope="module")
def learned(own_cache: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("patches") / "run"
    assert fit.main([*PATCHES, "--out", str(run)]) == 0
    assert export([str(run), "--out", str(run / "bundle")]) == 0
    return run


def test_patches_tell_digits_apart_and_belong_to_the_run(learned: Path) -> None:
    found, config = json.loads((learned / "metrics.json").read_text()), read_config(learned)
    assert found["cil_accuracy"] >= 0.95
    assert found["unknown"]["auroc"] >= 0.85
    assert config.trunk is not None
    assert (config.trunk.name, config.trunk.size, config.trunk.depths) == ("patches", 32, (320,))
    assert (learned / OWN_WEIGHTS).stat().st_size < 40 * 108 * 4 + 1000
    bundle = load_bundle(learned / "bundle")
    assert bundle.manifest.verification["fp32"]["label_agreement"] == 1
    assert BundleModel.load(learned / "bundle", provider="cpu").manifest.trunk is not None


def test_filters_are_of_the_first_task_alone_and_tasks_are_added(learned: Path, tmp_path: Path) -> None:
    short = tmp_path / "run"
    words = [*PATCHES, "--out", str(short)]
    words[words.index(TASKS)] = "0,1"
    assert fit.main(words) == 0
    assert (short / OWN_WEIGHTS).read_bytes() == (learned / OWN_WEIGHTS).read_bytes()
    assert fit.add_task([str(short), "2,3"]) == 0
    assert_same_tensors(run_tensors(short), run_tensors(learned))


def test_a_run_that_dies_before_its_first_checkpoint_goes_on_with_its_filters(learned: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        raise_at_call(patch, pooled_learner, "save", 1)
        assert fit.main([*PATCHES, "--out", str(run)]) == 2
    assert fit.main(["--out", str(run), "--resume"]) == 0
    assert_same_tensors(run_tensors(run), run_tensors(learned))


def test_a_run_without_its_filters_is_refused_with_a_remedy(
    learned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(learned, tmp_path / "run"))
    (run / OWN_WEIGHTS).rename(tmp_path / "kept.safetensors")
    assert evaluate([str(run)]) == 2
    assert (
        "that file is missing: restore it from a copy, or give its place with --trunk-weights"
        in capsys.readouterr().err
    )
    assert evaluate([str(run), "--trunk-weights", str(tmp_path / "kept.safetensors")]) == 0


# ---- a file of the user


@pytest.fixture(scope="module")
def brought(own_cache: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("brought")
    file = write_extractor(place / "mine.onnx")
    words = ["--preset", "digits", "--trunk", f"onnx:{file}", "--trunk-option", "mean=0.5", "--trunk-option", "std=0.5"]
    assert fit.main([*words, "--tasks", TASKS, "--out", str(place / "run")]) == 0
    return place


def test_a_file_becomes_part_of_the_bundle_and_not_of_the_run(brought: Path) -> None:
    run = brought / "run"
    assert json.loads((run / "metrics.json").read_text())["cil_accuracy"] >= 0.9
    assert not (run / OWN_WEIGHTS).exists()
    config = read_config(run)
    assert config.trunk is not None
    assert config.trunk.options["mean"] == "0.5,0.5,0.5"
    assert export([str(run), "--out", str(run / "bundle")]) == 0
    bundle = load_bundle(run / "bundle")
    assert bundle.manifest.trunk is not None
    assert bundle.manifest.trunk.name == "onnx:mine.onnx", "a bundle does not name folders of this machine"
    assert str(brought) not in (run / "bundle" / "manifest.json").read_text()
    # Its vectors are maps, and not their averages.
    assert not (run / "bundle" / MAPS).exists()
    assert not BundleModel.load(run / "bundle", provider="cpu").explains


def test_a_file_that_is_missing_or_another_is_refused_until_it_is_given(
    brought: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(brought / "run", tmp_path / "run"))
    file = brought / "mine.onnx"
    moved = Path(shutil.move(file, tmp_path / "moved.onnx"))
    commands = {
        "resume": lambda *more: fit.main(["--out", str(run), "--resume", *more]),
        "add-task": lambda *more: fit.add_task([str(run), "4,5", *more]),
        "export": lambda *more: export([str(run), "--out", str(tmp_path / "bundle"), *more]),
    }
    try:
        for name, command in commands.items():
            assert command() == 2, name
            assert f"{file}: cannot be read" in (error := capsys.readouterr().err), name
            assert "--trunk-weights FILE" in error
        write_extractor(file)
        content = onnx.load(file)
        content.graph.node[1].op_type = "Sigmoid"
        onnx.save(content, file)
        for name, command in commands.items():
            assert command() == 2, name
            assert "but the run was learned with" in capsys.readouterr().err, name
        for name, command in commands.items():
            assert command("--trunk-weights", str(moved)) == 0, name
    finally:
        shutil.move(moved, file)
    assert read_config(run).tasks[-1] == ("4", "5")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--trunk", "eficientnet-lite0"], "allowed: efficientnet-lite0, .*; did you mean 'efficientnet-lite0'?"),
        (["--trunk", "onnx:nowhere.onnx"], "nowhere.onnx: cannot be read"),
        (["--trunk", "patches", "--trunk-option", "count"], "got 'count'; allowed: NAME=VALUE"),
        (["--trunk", "efficientnet-lite0", "--trunk-option", "mean=0"], "has no options; got mean=0"),
    ],
)
def test_a_trunk_that_cannot_be_opened_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], reason: str
) -> None:
    command = ["fit", "--preset", "digits", *words, "--out", str(tmp_path / "run")]
    with pytest.raises(SystemExit) as ended:
        sys.exit(openworld(command))
    assert ended.value.code == 2
    assert re.search(reason, capsys.readouterr().err)
    assert not (tmp_path / "run").exists()
