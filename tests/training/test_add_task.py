"""New classes are added to a finished run later, from its checkpoint and the new images alone."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from models.detectors import decisions
from serving.bundle.decision import judge
from tests.helpers import assert_same_tensors, kill_at_save, run_tensors, tiny_source, use_tiny_preset
from training import fit
from training.data.datasets import SOURCES
from training.data.images import Source
from training.evaluate import main as evaluate
from training.learn.decisions import Decider, make_decider
from training.learn.measurements import all_measurements
from training.presets import PRESETS
from training.run import open_run
from training.store.checkpoint import CONFIG, CURRENT, METRICS, PREVIOUS, load, read_config
from training.store.history import HISTORY

FIRST, ADDED = "zero,one; two", "three,four"
CPU = torch.device("cpu")
UNCORRECTED = [name for name, decision in decisions().items() if not decision.corrected]


@pytest.fixture(autouse=True)
def tiny_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    use_tiny_preset(monkeypatch)


def run(out: Path, *more: str) -> int:
    return fit.main(["--out", str(out), *more])


def metrics(folder: Path) -> dict[str, Any]:
    return {**json.loads((folder / METRICS).read_text()), "wall_seconds": None}


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module", params=["hat", pytest.param("sup", marks=pytest.mark.long)])
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def first_run(method: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of three classes; tests work on copies of it."""
    folder = tmp_path_factory.mktemp(method) / "first"
    with pytest.MonkeyPatch.context() as patch:
        use_tiny_preset(patch)
        assert run(folder, "--method", method, "--tasks", FIRST) == 0
    return folder


@pytest.fixture(scope="module")
def whole_run(method: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, with all tasks learned in one command."""
    folder = tmp_path_factory.mktemp(method) / "whole"
    with pytest.MonkeyPatch.context() as patch:
        use_tiny_preset(patch)
        assert run(folder, "--method", method, "--tasks", f"{FIRST}; {ADDED}") == 0
    return folder


@pytest.fixture
def copied(first_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(first_run, tmp_path / "run"))


def assert_same_run(got: Path, wanted: Path) -> None:
    assert_same_tensors(run_tensors(got), run_tensors(wanted))
    assert load(got).progress.nats == load(wanted).progress.nats
    assert metrics(got) == metrics(wanted)


def test_learning_in_two_sessions_equals_learning_in_one(copied: Path, whole_run: Path) -> None:
    assert run(copied, "--add-task", ADDED) == 0
    assert_same_run(copied, whole_run)
    assert [lesson.tasks for lesson in read_config(copied).lessons] == [
        (("zero", "one"), ("two",)),
        (("three", "four"),),
    ]


@pytest.mark.long
def test_several_tasks_may_come_at_once_or_one_by_one(copied: Path, first_run: Path, tmp_path: Path) -> None:
    assert run(copied, "--add-task", "four; three") == 0
    other = Path(shutil.copytree(first_run, tmp_path / "other"))
    assert run(other, "--add-task", "four") == 0
    assert run(other, "--add-task", "three") == 0
    assert_same_run(copied, other)


def test_earlier_tasks_answer_to_the_bit_as_before(copied: Path) -> None:
    before = open_run(copied, CPU)
    pixels = tiny_source().test.pixels
    old_outputs = before.outputs(pixels, CPU)
    assert run(copied, "--add-task", ADDED) == 0
    after = open_run(copied, CPU)
    for name, values in after.outputs(pixels, CPU).items():
        assert values[:, :3].tobytes() == old_outputs[name].tobytes(), name
    assert after.rule.tasks[:2] == before.rule.tasks


class Knowledge:
    """The outputs of a run's tasks for the test images of the first four tasks, as input to every decision."""

    def __init__(self, folder: Path) -> None:
        self.run, test = open_run(folder, CPU), tiny_source().test
        own = [test.of(labels).pixels for labels in self.run.config.tasks[:4]]
        self.outputs = [all_measurements(self.run.network, pixels, CPU) for pixels in own]

    def decider(self, name: str) -> Decider:
        return make_decider(self.run.network, name, self.run.config.preset.alpha)

    def accepted(self, decider: Decider) -> list[bool]:
        """Whether each of those images is accepted as known."""
        return [
            known for outputs in self.outputs for known in judge(decider.outputs(outputs), decider.rule).known.tolist()
        ]


def test_a_fifth_task_changes_nothing_that_four_tasks_know(method: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert run(folder, "--method", method, "--tasks", "zero; one; two; three") == 0
    tensors, before = run_tensors(folder), Knowledge(folder)
    assert run(folder, "--add-task", "four") == 0
    after = run_tensors(folder)
    own = [name for name in tensors if name.startswith(("network.detectors.", "network.heads.", "network.ranges."))]
    assert {f"network.detectors.{task}.own.logits" for task in range(4)} < set(own)
    assert_same_tensors({name: after[name] for name in own}, {name: tensors[name] for name in own})
    now = Knowledge(folder)
    for name in UNCORRECTED:
        earlier, later = before.decider(name), now.decider(name)
        assert later.scorers[:4] == earlier.scorers, name
        assert later.rule.tasks[:4] == earlier.rule.tasks, name
        accepted = before.accepted(earlier)
        assert any(accepted), name
        assert all(still for still, once in zip(now.accepted(later), accepted, strict=True) if once), name


def test_no_old_image_is_looked_at(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The training images of old classes are replaced by noise, and the result does not change."""
    whole = tiny_source()
    noise = np.random.default_rng(1).integers(0, 255, whole.train.pixels.shape, dtype=np.uint8)
    old = np.isin(whole.train.labels, ["zero", "one", "two"])
    whole.train.pixels[old] = noise[old]

    def load_noise(*place: Any) -> Source:
        return whole

    other = Path(shutil.copytree(copied, copied.with_name("other")))
    assert run(other, "--add-task", ADDED) == 0
    monkeypatch.setitem(SOURCES, "tiny", load_noise)
    assert run(copied, "--add-task", ADDED) == 0
    assert_same_run(copied, other)


@pytest.mark.long
@pytest.mark.parametrize("number", [1, 3, 5])
def test_an_added_task_that_is_killed_is_resumed(number: int, copied: Path, whole_run: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        kill_at_save(patch, number, written=number != 3)
        assert run(copied, "--add-task", ADDED) == 130
    assert not (copied / METRICS).exists(), "the metrics of fewer tasks than it shall have"
    assert run(copied, "--resume") == 0
    assert_same_run(copied, whole_run)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--add-task", "three,two"], "task 1 has already learned 'two', and a class belongs to one task"),
        (["--add-task", "three,three"], "each class belongs to one task; given twice: three"),
        (["--add-task", "three,cat"], "no images of 'cat'; the data has: zero, one, two, three, four"),
        (["--add-task", " ; "], "every task needs at least one class"),
        (["--add-task", ""], "every task needs at least one class"),
        (["--add-task", "three", "--data", "/nowhere"], "/nowhere: no such folder"),
        (["--add-task", "three", "--resume"], "--resume and --add-task exclude each other; allowed: only one of them"),
        (["--add-task", "three", "--seed", "1"], "config.json: leave out --seed"),
        (["--add-unknowns", "elsewhere"], "--add-unknowns elsewhere names the run: leave out --out"),
    ],
)
def test_what_cannot_be_added_is_refused_and_changes_nothing(
    arguments: list[str], message: str, copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(copied)
    assert run(copied, *arguments) == 2
    assert message in capsys.readouterr().err
    assert files(copied) == before


def test_adding_to_an_unfinished_run_is_refused(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        kill_at_save(patch, 2, written=True)
        assert run(copied, "--add-task", "three") == 130
    assert run(copied, "--add-task", "four") == 2
    assert f"2 of 3 tasks are learned; finish it with `openworld fit --out {copied} --resume`" in (
        capsys.readouterr().err
    )


def test_adding_to_a_folder_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path / "run", "--add-task", "three") == 2
    assert "not a run" in capsys.readouterr().err


# ---- images from folders


def write_classes(root: Path, labels: tuple[str, ...]) -> Path:
    """The training and test images of some classes, as folders of PNG files."""
    whole = tiny_source()
    for part, images in (("train", whole.train), ("test", whole.test)):
        for label in labels:
            folder = root / part / label
            folder.mkdir(parents=True)
            for number, pixels in enumerate(images.of([label]).pixels):
                Image.fromarray(pixels[:, :, 0]).save(folder / f"{number:03}.png")
    return root


def test_a_folder_of_new_classes_is_learned_and_remembered(copied: Path, tmp_path: Path) -> None:
    folder = write_classes(tmp_path / "more", ("three", "four"))
    other = Path(shutil.copytree(copied, tmp_path / "other"))
    assert run(other, "--add-task", ADDED, "--data", str(folder)) == 0
    with pytest.MonkeyPatch.context() as patch:
        kill_at_save(patch, 2, written=True)
        assert run(copied, "--add-task", ADDED, "--data", str(folder)) == 130
    assert read_config(copied).lessons[1].data == str(folder)
    assert run(copied, "--resume") == 0
    assert_same_run(copied, other)


def test_a_folder_of_other_classes_is_refused_by_name(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_classes(tmp_path / "more", ("three",))
    assert run(copied, "--add-task", ADDED, "--data", str(folder)) == 2
    assert "no images of 'four'; the data has: three" in capsys.readouterr().err


def test_a_new_class_that_is_too_small_is_refused_before_anything_changes(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_classes(tmp_path / "more", ("three", "four"))
    for path in sorted((folder / "train" / "four").iterdir())[1:]:
        path.unlink()
    before = files(copied)
    assert run(copied, "--add-task", "three; four", "--data", str(folder)) == 2
    assert "too few images: 'four' of task 3 has 1 to learn from and 5 to test on" in capsys.readouterr().err
    assert files(copied) == before


def test_missing_images_are_reported_and_left_out(
    copied: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_classes(tmp_path / "more", ("three", "four"))
    assert run(copied, "--add-task", ADDED, "--data", str(folder)) == 0
    whole = metrics(copied)
    assert (whole["test_images"], whole["untested_tasks"]) == (25, [])
    moved = folder.rename(tmp_path / "moved")
    capsys.readouterr()
    assert evaluate([str(copied), "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert f"not measured: no test images of three, four: {folder}: no such folder" in caplog.text
    assert (measured["test_images"], measured["untested_tasks"]) == (15, [2])
    assert measured["accuracy_matrix"][2] == [*whole["accuracy_matrix"][2][:2], None]
    assert evaluate([str(copied)]) == 0, "a table with a gap"
    capsys.readouterr()
    assert evaluate([str(copied), "--json", "--data", str(moved)]) == 0
    assert {**json.loads(capsys.readouterr().out), "wall_seconds": None} == whole


def test_a_run_whose_images_are_all_gone_cannot_be_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_classes(tmp_path / "images", ("zero", "one"))
    assert run(tmp_path / "run", "--preset", "digits", "--data", str(folder)) == 0
    shutil.rmtree(folder)
    assert evaluate([str(tmp_path / "run")]) == 2
    assert f"error: no test images of one, zero: {folder}: no such folder" in capsys.readouterr().err


def test_a_run_stores_no_image(copied: Path) -> None:
    assert run(copied, "--add-task", ADDED) == 0
    assert {path.name for path in copied.iterdir()} == {CONFIG, METRICS, HISTORY, CURRENT, PREVIOUS}
    shapes = [tensor.shape for tensor in run_tensors(copied).values()]
    assert not [shape for shape in shapes if tuple(shape[-2:]) == (8, 8)]


def test_unknown_images_that_two_folders_have_are_counted_once(tmp_path: Path) -> None:
    first = write_classes(tmp_path / "first", ("zero", "one", "two"))
    second = write_classes(tmp_path / "second", ("two", "three", "four"))
    out = tmp_path / "run"
    assert run(out, "--tasks", "zero,one", "--data", str(first), "--preset", "digits") == 0
    assert json.loads((out / METRICS).read_text())["unknown_images"] == 5
    assert run(out, "--add-task", "three", "--data", str(second)) == 0
    # Five of "two", which both folders have, and five of "four".
    assert json.loads((out / METRICS).read_text())["unknown_images"] == 10


def test_one_class_and_cross_entropy_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert run(out, "--loss", "ce", "--tasks", "zero,one; two") == 2
    assert "task 1 has the one class 'two', from which cross-entropy learns nothing; allowed: two or more" in (
        capsys.readouterr().err
    )
    assert not out.exists()
    assert run(out, "--loss", "ce", "--tasks", "zero,one") == 0
    assert run(out, "--add-task", "two") == 2
    assert "task 1 has the one class 'two'" in capsys.readouterr().err


@pytest.mark.parametrize(("alpha", "few"), [(1 / 20, True), (1 / 11, True), (1 / 10, False)])
def test_a_task_with_too_few_images_to_reject_any_is_reported(
    alpha: float, few: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The task has the measurements of ten images, so the smallest p-value is 1/11."""
    monkeypatch.setitem(PRESETS, "digits", replace(PRESETS["digits"], images_per_class=5, alpha=alpha))
    assert run(tmp_path / "run", "--tasks", "zero,one") == 0
    message = (
        f"task 0 (zero, one): 10 images are too few to call an image unknown at alpha {alpha}; "
        f"allowed: at least {round(1 / alpha)}. With this task, every image is called known"
    )
    assert (message in capsys.readouterr().err) == few
    measured = json.loads((tmp_path / "run" / METRICS).read_text())
    assert (measured["accepted_known"], measured["unknown"]["rejected_unknown"]) == (1.0, 0.0) or not few
