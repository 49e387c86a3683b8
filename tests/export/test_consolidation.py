"""`openworld learn-unknowns --consolidate`: an adapter of taught classes is learned, and kept if it is better."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from export.__main__ import main as export
from export.loop import main as learn_unknowns
from serving.bundle.manifest import load_bundle
from serving.bundle.model import BundleModel
from serving.bundle.pixels import open_image, to_pixels
from serving.bundle.shelf import Shelf
from serving.model import Model as Teachable
from serving.quarantine.store import Store
from tests.helpers_quarantine import arrival
from tests.helpers_teaching import pictures
from training import fit
from training.data.cache import FOLDER_VARIABLE
from training.learn.adapters import consolidation
from training.learn.adapters.choice import Candidate, Choice, JudgedAdapters, choose

pytestmark = pytest.mark.long

KNOWN, NEW = ("ant", "bee", "cat", "dog"), ("elk", "fox")
SIDE, DIM = 32, 48


def write_trunk(file: Path) -> Path:
    """A fixed random layer: from images [batch, 3, 32, 32] to vectors, as a user would bring it."""
    weights = np.random.default_rng(5).standard_normal((3 * SIDE * SIDE, DIM)).astype(np.float32)
    nodes = [
        helper.make_node("Flatten", ["images"], ["flat"]),
        helper.make_node("MatMul", ["flat", "weights"], ["mixed"]),
        helper.make_node("Relu", ["mixed"], ["features"]),
    ]
    graph = helper.make_graph(
        nodes,
        "trunk",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, ["batch", 3, SIDE, SIDE])],
        [helper.make_tensor_value_info("features", TensorProto.FLOAT, ["batch", DIM])],
        [numpy_helper.from_array(weights, "weights")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), file)
    return file


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run with adapters of four classes, two per task."""
    place = tmp_path_factory.mktemp("consolidated")
    for label in KNOWN:
        (place / "photos" / label).mkdir(parents=True)
        for number, content in enumerate(pictures(label, 12)):
            (place / "photos" / label / f"{number}.png").write_bytes(content)
    trunk = write_trunk(place / "trunk.onnx")
    words = ["--data", str(place / "photos"), "--classes-per-task", "2", "--trunk", f"onnx:{trunk}", "--epochs", "2"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER_VARIABLE, str(place / "cache"))
        assert fit.main([*words, "--width", "16", "--batch-size", "16", "--out", str(place / "run")]) == 0
        yield place / "run"


@pytest.fixture(scope="module")
def bundle(run: Path) -> Path:
    assert export([str(run), "--out", str(run.parent / "bundle"), "--force"]) == 0
    return run.parent / "bundle"


def test_taught_classes_are_consolidated(
    run: Path, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An adapter of what was taught is learned, compared with the taught form, and published if it is better."""
    shown = {label: pictures(label, 8) for label in NEW}
    taught = Teachable.load(bundle, threads=1)
    for label, contents in shown.items():
        taught.teach({label: contents})
    shelf = Shelf(tmp_path / "shelf")
    taught.save(shelf.folder / taught.version)
    shelf.point_at(taught.version)
    url = f"sqlite:///{tmp_path}/quarantine.db"
    with closing(Store.open(url)) as store:
        for label, contents in shown.items():
            store.teach(store.add([arrival(content=each) for each in contents]).ids, label, taught.labels, "ada")
    words = [str(run), "--consolidate", "--publish", str(shelf.folder), "--quarantine", url, "--min-images", "5"]
    # An adapter that does not earn its place is not kept.
    monkeypatch.setattr(consolidation, "choose", _never)
    assert learn_unknowns(words) == 0
    assert "what was taught is kept as it is" in capsys.readouterr().err
    assert shelf.current() == shelf.folder / taught.version
    monkeypatch.setattr(consolidation, "choose", _always)
    assert learn_unknowns(words) == 0
    shown_table, said = capsys.readouterr()
    assert "validation photos of 2 taught classes" in shown_table
    assert "with an adapter" in shown_table
    after = shelf.current()
    assert after is not None
    assert f"published version {after.name}" in said
    before, now = load_bundle(shelf.folder / taught.version).manifest, load_bundle(after).manifest
    assert [(group.labels, group.images, group.weight) for group in now.consolidated] == [(NEW, 16, 0.5)]
    # Every part of what was learned and taught before is the same, to the bit; the adapter is new.
    assert {name: now.files[name] for name in before.files if name != "golden.npz"} == {
        name: info for name, info in before.files.items() if name != "golden.npz"
    }
    assert set(now.files) - set(before.files) == {"adapter0.npz"}
    _check_sharpened(shelf.folder / taught.version, after)
    # Nothing is left to consolidate, and a class that is taken out leaves what there would be without it.
    assert learn_unknowns(words) == 0
    assert "nothing to consolidate: 0 taught classes" in "".join(capsys.readouterr())
    forgetful, never = Teachable.load(after, threads=1), Teachable.load(bundle, threads=1)
    forgetful.rename("fox", "vixen")
    assert forgetful.version != taught.version
    forgetful.rename("vixen", "fox")
    assert forgetful.version == now.version
    forgetful.forget("elk")
    never.teach({"fox": shown["fox"]})
    assert forgetful.version == never.version
    assert learn_unknowns([*words, "--resume"]) == 2
    assert "--consolidate with --resume; allowed: --consolidate --publish SHELF" in capsys.readouterr().err


def _check_sharpened(before: Path, after: Path) -> None:
    """Among the two classes answers differ; neither their common probability nor any distance does."""
    models = [BundleModel.load(folder, provider="cpu", threads=1) for folder in (before, after)]
    spec = models[0].manifest.image
    pixels = np.stack([to_pixels(open_image(content), spec) for content in pictures("fox", 5, first=90)])
    was, now = (model.run(pixels) for model in models)
    assert np.array_equal(was["distances"], now["distances"])
    np.testing.assert_allclose(was["probability"][:, :4], now["probability"][:, :4], atol=1e-5)
    np.testing.assert_allclose(was["probability"][:, 4:].sum(1), now["probability"][:, 4:].sum(1), atol=1e-5)
    assert not np.allclose(was["probability"][:, 4:], now["probability"][:, 4:], atol=1e-6)


def _never(judged: Sequence[JudgedAdapters], most: int) -> Choice:
    return replace(choose(judged, most), weight=0.0)


def _always(judged: Sequence[JudgedAdapters], most: int) -> Choice:
    return replace(choose(judged, most), weight=0.5, rotations=1, best=Candidate(0.5, 1))
