"""Photos with adapters: learned, killed and resumed, added to, exported and served.

Drawn shapes are told apart by statistics alone, so most tests let a run use its adapters all the same.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from export.__main__ import main as export
from export.checks import photo_evidence
from export.checks.parity import ParityError
from export.publish import main as publish
from models.network import Network
from models.trunks.cache_settings import FOLDER_VARIABLE
from serving.bundle.decision import OUTPUT_NAMES
from serving.bundle.errors import BundleError
from serving.bundle.manifest import load_bundle
from serving.bundle.model import BundleModel
from serving.bundle.pixels import decode, to_pixels
from serving.bundle.pooled.adapters import PREFIX
from tests.helpers import assert_same_tensors, raise_at_call, run_tensors
from tests.helpers_photos import grown_run, write_photos
from tests.helpers_serving import reseal
from training import fit
from training.compare_scores import main as compare
from training.diagnose import main as diagnose
from training.evaluate import main as evaluate
from training.learn import pooled_learner
from training.learn.adapters import adapter_learner, state
from training.learn.adapters.choice import Candidate, Choice, JudgedAdapters, choose
from training.store.checkpoint import read_config
from training.store.history import History

pytestmark = pytest.mark.long

TASKS = "disc,stripes; checks,triangle"
COUNTS = {"disc": 20, "stripes": 20, "checks": 20, "triangle": 20, "ring": 6, "dots": 32}
SMALL = ["--size", "64", "--epochs", "3", "--width", "32", "--batch-size", "16"]


class Line(NamedTuple):
    """A folder of photos, a run with adapters of four of its six classes, and its bundle."""

    photos: Path
    run: Path
    bundle: Path


def use_adapters(patch: pytest.MonkeyPatch, rotations: int = 1) -> None:
    """Let runs use their adapters, whether they earn it or not."""

    def chosen(judged: Sequence[JudgedAdapters], most: int) -> Choice:
        return replace(choose(judged, most), weight=0.5, rotations=rotations, best=Candidate(0.5, rotations))

    patch.setattr(state, "choose", chosen)


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER_VARIABLE, str(tmp_path_factory.mktemp("cache")))
        # Every photo that an export verifies is decoded and encoded again.
        patch.setattr(photo_evidence, "MOST_PHOTOS", 12)
        use_adapters(patch)
        yield


@pytest.fixture(scope="module")
def line(own_cache: None, tmp_path_factory: pytest.TempPathFactory) -> Line:
    place = tmp_path_factory.mktemp("photos")
    photos = write_photos(place / "photos", **COUNTS)
    assert fit.main(["--data", str(photos), "--tasks", TASKS, *SMALL, "--out", str(place / "run")]) == 0
    assert export([str(place / "run"), "--out", str(place / "bundle")]) == 0
    return Line(photos, place / "run", place / "bundle")


def pixels_of(line: Line, *photos: str) -> Any:
    spec = load_bundle(line.bundle).manifest.image
    return np.stack([to_pixels(decode((line.photos / name).read_bytes()), spec) for name in photos])


def metrics_of(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "metrics.json").read_text()))


def adapter_arrays(bundle: Path, task: int) -> dict[str, Any]:
    return {name: values for name, values in np.load(bundle / f"task{task}.npz").items() if name.startswith(PREFIX)}


def test_a_run_reports_what_adapters_add_and_what_they_cost(line: Line) -> None:
    config, found = read_config(line.run), metrics_of(line.run)
    assert (config.method, config.loss, config.quick) == ("hat", "csi", False)
    assert (found["decision"], found["adapters"]["used"], found["adapters"]["weight"]) == ("pooled+logits", True, 0.5)
    assert 0 < found["adapters"]["share_of_time"] < 1
    assert found["adapters"]["validation"]["images"] >= 4
    for place in ("validation", "test"):
        for side in ("statistics", "with_adapters"):
            assert {"wp", "tp", "cil"} <= {*found["adapters"][place][side]}
    assert found["cil_accuracy"] >= 0.8
    assert 0 < found["capacity_used"] <= 1
    page = (line.run / "report.html").read_text()
    assert "What adapters add" in page
    assert "Adapters sharpen the classes within each task" in page


def test_a_task_keeps_its_probability_and_its_distances(line: Line) -> None:
    """Adapters change the classes within a task, and neither which task it is nor whether an image is known."""
    model = BundleModel.load(line.bundle, provider="cpu")
    assert model.pooled is not None
    alone = replace(model, pooled=replace(model.pooled, adapters=(), weight=0.0))
    pixels = pixels_of(line, *(f"{label}/00{number}.jpg" for label in ("disc", "dots") for number in range(4)))[:7]
    together, without = model.run(pixels), alone.run(pixels)
    np.testing.assert_allclose(together["p_task"], without["p_task"], atol=1e-5)
    assert np.array_equal(together["distances"], without["distances"])
    assert not np.array_equal(together["logits"], without["logits"])
    for row in range(len(pixels)):
        single = model.run(pixels[row : row + 1])
        assert all(np.array_equal(single[name][0], together[name][row]) for name in OUTPUT_NAMES)


def test_a_bundle_stays_small_and_was_compared_with_the_network(line: Line) -> None:
    bundle = load_bundle(line.bundle)
    assert bundle.rule.score == "pooled+logits"
    assert 0 <= bundle.manifest.verification["fp32"]["adapter_difference"] <= 0.02
    for task in range(2):
        assert (line.bundle / f"task{task}.npz").stat().st_size <= 1.5e6
        assert adapter_arrays(line.bundle, task)


# ---- more tasks, and runs that die


@pytest.fixture(scope="module")
def grown(line: Line, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return grown_run(line.run, line.photos, tmp_path_factory.mktemp("grown"))


def test_a_run_that_dies_again_and_again_ends_the_same(
    line: Line, grown: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies in both steps of an adapter and between tasks. It is also the same to the bit as a run that was taught
    its last task later, and that wrote no checkpoint between epochs."""
    monkeypatch.setattr(adapter_learner, "CHECKPOINT_SECONDS", 0.0)
    run = tmp_path / "run"
    words = ["--data", str(line.photos), "--tasks", f"{TASKS}; dots", *SMALL, "--out", str(run)]
    with pytest.MonkeyPatch.context() as patch:
        raise_at_call(patch, pooled_learner, "save", 3)
        assert fit.main(words) == 2
    for number in (4, 7):
        with pytest.MonkeyPatch.context() as patch:
            raise_at_call(patch, pooled_learner, "save", number)
            assert fit.main(["--out", str(run), "--resume"]) == 2
    assert fit.main(["--out", str(run), "--resume"]) == 0
    assert_same_tensors(run_tensors(run), run_tensors(grown))
    places = [(each.task, each.phase, each.epoch) for each in History(run).epochs]
    assert len(places) == len(set(places)) == 3 * (3 + read_config(run).preset.head.epochs)


def test_photos_that_changed_while_a_task_is_half_learned_are_refused(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(adapter_learner, "CHECKPOINT_SECONDS", 0.0)
    photos, run = Path(shutil.copytree(line.photos, tmp_path / "photos")), tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        raise_at_call(patch, pooled_learner, "save", 2)
        assert fit.main(["--data", str(photos), "--tasks", TASKS, *SMALL, "--out", str(run)]) == 2
    for file in sorted((photos / "disc").iterdir())[:4]:
        file.unlink()
    capsys.readouterr()
    assert fit.main(["--out", str(run), "--resume"]) == 2
    assert "task 0 is half learned, and its images have changed since" in capsys.readouterr().err


def test_files_of_earlier_tasks_stay_as_they_are(line: Line, grown: Path, tmp_path: Path) -> None:
    shelf = tmp_path / "shelf"
    assert publish([str(line.run), str(shelf)]) == 0
    assert publish([str(grown), str(shelf)]) == 0
    new, old = load_bundle(shelf / "current"), load_bundle(shelf / "previous")
    assert new.manifest.labels[-1] == "dots"
    for name in ("trunk.onnx", "task0.npz", "task1.npz"):
        assert (new.path / name).read_bytes() == (old.path / name).read_bytes()


# ---- what else a run can be


def test_adapters_that_do_not_improve_accuracy_are_left_out(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(state, "choose", lambda judged, most: replace(choose(judged, most), weight=0.0))
    assert evaluate([str(line.run)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Adapters did not improve accuracy enough, so statistics alone decide" in printed
    assert "% of the learning, which --quick saves" in printed
    assert export([str(line.run), "--out", str(tmp_path / "bundle")]) == 0
    bundle = load_bundle(tmp_path / "bundle")
    assert bundle.rule.score == "pooled"
    assert not adapter_arrays(tmp_path / "bundle", 0)
    assert "adapter_weight" not in np.load(tmp_path / "bundle" / "pooled.npz")
    assert export([str(line.run), "--decision", "pooled+logits", "--out", str(tmp_path / "asked")]) == 0
    assert adapter_arrays(tmp_path / "asked", 0)


def test_all_rotations_are_read_where_that_was_chosen(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_adapters(monkeypatch, rotations=4)
    assert export([str(line.run), "--out", str(tmp_path / "bundle")]) == 0
    model = BundleModel.load(tmp_path / "bundle", provider="cpu")
    assert model.pooled is not None
    assert model.pooled.rotations == 4
    pixels = pixels_of(line, "disc/001.jpg", "checks/002.jpg")
    upright = BundleModel.load(line.bundle, provider="cpu").run(pixels, features=True)
    turned = model.run(pixels, features=True)
    assert np.array_equal(turned["features"], upright["features"])
    assert not np.array_equal(turned["logits"], upright["logits"])
    assert np.array_equal(turned["distances"], upright["distances"])


def test_supermasks_take_two_bits_per_weight(line: Line, tmp_path: Path) -> None:
    words = ["--data", str(line.photos), "--tasks", TASKS, *SMALL, "--method", "sup", "--out", str(tmp_path / "run")]
    assert fit.main(words) == 0
    assert export([str(tmp_path / "run"), "--out", str(tmp_path / "bundle")]) == 0
    arrays = adapter_arrays(tmp_path / "bundle", 0)
    assert arrays[f"{PREFIX}layer0.kept"].nbytes == 32 * 2048 // 8
    assert f"{PREFIX}layer0.weight" not in arrays


def test_every_command_takes_a_run_with_adapters(line: Line, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare([str(line.run), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["decision"] for row in rows][:2] == ["pooled", "pooled+logits"]
    assert [row["decision"] for row in rows if row["chosen"]] == ["pooled+logits"]
    assert diagnose([str(line.run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["capacity"]["of"] == "units"
    assert evaluate([str(line.run), "--decision", "pooled", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["decision"] == "pooled"
    assert evaluate([str(line.run), "--tp", "softmax"]) == 2
    assert "it decides by statistics of encoded vectors" in capsys.readouterr().err


# ---- what is refused


def test_an_adapter_that_differs_from_the_network_is_not_exported(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = Network.head

    def moved(self: Network, task: int) -> Any:
        head = real(self, task)
        head.bias.data[0, 0, 0] += 1.0
        return head

    monkeypatch.setattr(Network, "head", moved)
    assert export([str(line.run), "--out", str(tmp_path / "bundle")]) == 2
    assert "adapters: a logit differs from the network's" in capsys.readouterr().err
    assert issubclass(ParityError, Exception)


def test_several_processes_are_refused(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pooled_learner, "processes", lambda: 2)
    words = ["--data", str(line.photos), "--tasks", TASKS, *SMALL, "--out", str(tmp_path / "run")]
    assert fit.main(words) == 2
    assert "adapters on a trunk are learned by one process, got 2" in capsys.readouterr().err


def test_a_damaged_adapter_is_refused_by_name(line: Line, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(line.bundle, tmp_path / "bundle"))
    arrays = dict(np.load(copy / "task1.npz"))
    del arrays[f"{PREFIX}heads"]
    stored = io.BytesIO()
    np.savez(stored, **arrays)
    reseal(copy, "task1.npz", stored.getvalue())
    with pytest.raises(BundleError, match=r"adapters of tasks: .*export the run again"):
        BundleModel.load(copy, provider="cpu")
