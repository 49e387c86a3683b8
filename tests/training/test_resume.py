"""A run that is killed at any point and resumed ends with the same result as an uninterrupted run."""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serving.bundle.sections import ImageSpec
from tests.helpers import (
    HELD_OUT,
    TINY_SAVES,
    assert_same_tensors,
    kill_at_save,
    run_tensors,
    tiny_run,
    use_tiny_preset,
)
from tests.helpers_process import die_at_call, ended, forks
from tests.training.conftest import WholeRun
from training import fit
from training.data.datasets import SOURCES
from training.data.images import Source, join
from training.evaluate import main as evaluate
from training.learn import features as representation
from training.learn import learner
from training.store.checkpoint import CURRENT, PREVIOUS, load
from training.store.history import Epoch, History

AFTER_SAVE = {
    "mid features": 1,
    "all epochs of features": 2,
    "features finished": 3,
    "mid head": 4,
    "all epochs of head": 5,
    "between tasks": 6,
    "mid features of the last task": 7,
    "mid head of the last task": 10,
    "before measuring": TINY_SAVES,
}


@pytest.fixture(autouse=True)
def tiny_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    use_tiny_preset(monkeypatch)


def run(out: Path, *more: str) -> int:
    return fit.main(["--out", str(out), *more])


def killed_run(folder: Path, method: str, number: int, *, written: bool = True) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        kill_at_save(patch, number, written=written)
        assert run(folder, "--method", method) == 130
    return folder


def metrics(folder: Path) -> dict[str, Any]:
    return {**json.loads((folder / "metrics.json").read_text()), "wall_seconds": None}


def epochs(folder: Path) -> list[Epoch]:
    """The history, which must contain every epoch exactly once."""
    return [replace(epoch, seconds=0.0) for epoch in History(folder).epochs]


def count_saves(patch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows with every checkpoint."""
    real, saves = learner.save, []

    def save(*arguments: Any) -> None:
        saves.append(len(saves))
        real(*arguments)

    patch.setattr(learner, "save", save)
    return saves


def assert_same_run(got: Path, wanted: Path) -> None:
    assert_same_tensors(run_tensors(got), run_tensors(wanted))
    assert load(got).progress.nats == load(wanted).progress.nats
    assert metrics(got) == metrics(wanted)
    assert epochs(got) == epochs(wanted)


@pytest.mark.long
@pytest.mark.parametrize("number", AFTER_SAVE.values(), ids=AFTER_SAVE)
def test_a_run_killed_after_a_save_ends_the_same(
    number: int, whole_run: WholeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = killed_run(tmp_path / "run", whole_run.method, number)
    assert not (folder / "metrics.json").exists()
    saves = count_saves(monkeypatch)
    assert run(folder, "--resume") == 0
    assert len(saves) == TINY_SAVES - number
    assert_same_run(folder, whole_run.folder)


@pytest.mark.parametrize("number", [2, 5])
def test_a_run_killed_before_a_save_ends_the_same(number: int, whole_run: WholeRun, tmp_path: Path) -> None:
    folder = killed_run(tmp_path / "run", whole_run.method, number, written=False)
    assert run(folder, "--resume") == 0
    assert_same_run(folder, whole_run.folder)


def test_a_run_killed_before_its_first_save_starts_again(whole_run: WholeRun, tmp_path: Path) -> None:
    folder = killed_run(tmp_path / "run", whole_run.method, 1, written=False)
    assert not (folder / CURRENT).exists()
    assert run(folder, "--resume") == 0
    assert_same_run(folder, whole_run.folder)


def test_a_run_killed_twice_ends_the_same(whole_run: WholeRun, tmp_path: Path) -> None:
    folder = killed_run(tmp_path / "run", whole_run.method, 1)
    with pytest.MonkeyPatch.context() as patch:
        kill_at_save(patch, 3, written=True)
        assert run(folder, "--resume") == 130
    assert run(folder, "--resume") == 0
    assert_same_run(folder, whole_run.folder)


@forks
def test_a_process_killed_with_signal_9_in_the_middle_of_an_epoch_goes_on(whole_run: WholeRun, tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def learn_and_die() -> None:
        # Two batches make an epoch and two epochs a task: the middle of the second task's last epoch.
        die_at_call(representation, "supervised_contrastive", 8)
        run(folder, "--method", whole_run.method)

    assert ended(learn_and_die) == -signal.SIGKILL
    progress = load(folder).progress
    assert (progress.task, progress.phase, progress.epoch) == (1, "features", 1)
    assert run(folder, "--resume") == 0
    assert_same_run(folder, whole_run.folder)


@pytest.mark.long
def test_momentum_survives_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_tiny_preset(monkeypatch, optimizer="lars")
    assert run(tmp_path / "whole") == 0
    for number in (1, 7):
        folder = killed_run(tmp_path / f"killed after {number}", "hat", number)
        assert run(folder, "--resume") == 0
        assert_same_run(folder, tmp_path / "whole")


def killed_between_the_renames_of_a_save(folder: Path) -> Path:
    """The newest checkpoint has been moved aside and the next one has not taken its place."""
    killed_run(folder, "hat", 3)
    os.replace(folder / CURRENT, folder / PREVIOUS)
    return folder


def test_a_run_killed_in_the_middle_of_a_save_goes_on_from_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = killed_between_the_renames_of_a_save(tmp_path / "run")
    saves = count_saves(monkeypatch)
    assert run(folder, "--resume") == 0
    assert len(saves) == TINY_SAVES - 3


def test_a_run_killed_in_the_middle_of_a_save_is_not_overwritten(tmp_path: Path) -> None:
    folder = killed_between_the_renames_of_a_save(tmp_path / "run")
    assert run(folder) == 2


def test_resuming_a_finished_run_changes_nothing(whole_run: WholeRun, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole_run.folder, tmp_path / "run"))
    checkpoint, measured = (folder / CURRENT).read_bytes(), metrics(folder)
    assert run(folder, "--resume") == 0
    assert (folder / CURRENT).read_bytes() == checkpoint
    assert metrics(folder) == measured


def test_two_runs_with_one_seed_are_the_same_and_with_another_are_not(whole_run: WholeRun, tmp_path: Path) -> None:
    again = tiny_run(tmp_path / "again", whole_run.method)
    assert_same_run(again, whole_run.folder)
    assert run(tmp_path / "other", "--method", whole_run.method, "--seed", "1") == 0
    with pytest.raises(AssertionError):
        assert_same_tensors(run_tensors(tmp_path / "other"), run_tensors(whole_run.folder))


def test_an_existing_run_is_not_overwritten(whole_run: WholeRun, capsys: pytest.CaptureFixture[str]) -> None:
    before = (whole_run.folder / CURRENT).read_bytes()
    assert run(whole_run.folder) == 2
    assert (
        "already holds a run: continue with --resume, teach it more with --add-task, or use another --out"
        in capsys.readouterr().err
    )
    assert (whole_run.folder / CURRENT).read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "images"], "this preset learns from your own images: give their folder with --data FOLDER"),
        (["--preset", "images", "--data", "/nowhere"], "/nowhere: no such folder; give the one with the class folders"),
        (["--tasks", "zero,cat"], "no images of 'cat'; the data has: zero, one, two, three, four"),
        (["--tasks", "zero,one;one"], "each class belongs to one task; given twice: one"),
        (["--classes-per-task", "-1"], "classes per task is -1; allowed: 1 or more"),
        (["--tasks", ""], "every task needs at least one class"),
        (["--tasks", "zero", "--classes-per-task", "1"], "--tasks and --classes-per-task exclude each other"),
        (["--seed", "-1"], "seed is -1; allowed: 0 or more"),
        (["--size", "7"], "size is 7; allowed: 8 or more pixels"),
        (["--width", "0"], "width is 0; allowed: 1 or more channels"),
        (["--resume"], "not a run"),
        (["--add-task", ""], "not a run"),
    ],
)
def test_an_impossible_fit_prints_an_error_and_leaves_no_files(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path / "run", *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert not (tmp_path / "run").exists()


def test_resuming_with_other_settings_is_refused(whole_run: WholeRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(whole_run.folder, "--resume", "--seed", "1", "--classes-per-task", "4") == 2
    assert "config.json: leave out --seed, --classes-per-task" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "digit"], "preset is 'digit'; allowed: digits, "),
        (["--preset", "digit"], "; did you mean 'digits'?"),
        (["--method", "hta"], "method is 'hta'; allowed: hat, sup; did you mean 'hat'?"),
        (["--tasks", "zreo,one"], "no images of 'zreo'; the data has: zero, one"),
        (["--tasks", "zreo,one"], "; did you mean 'zero'?"),
    ],
)
def test_a_name_that_does_not_exist_is_refused_with_the_nearest_one(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path / "run", *arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_tasks_of_the_command_line_are_learned_and_the_rest_is_unknown(tmp_path: Path) -> None:
    assert run(tmp_path / "run", "--tasks", "two,zero; one") == 0
    measured = metrics(tmp_path / "run")
    assert len(measured["accuracy_matrix"]) == 2
    # Five test images of each class: three classes learned, `three` and the held-out one never.
    assert (measured["test_images"], measured["unknown_images"]) == (15, 10)


def test_evaluating_a_run_again_repeats_its_metrics(whole_run: WholeRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate([str(whole_run.folder), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert {**printed, "wall_seconds": None} == metrics(whole_run.folder)
    assert printed["method"] == whole_run.method
    assert printed["unknown_images"] == 5, HELD_OUT


def test_an_unfinished_run_cannot_be_evaluated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = killed_run(tmp_path / "run", "hat", 6)
    assert evaluate([str(folder)]) == 2
    assert f"{folder}: 1 of 2 tasks are learned; finish it with" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "accepted"), [(1, False), (4, False), (6, True)], ids=lambda value: str(value))
def test_a_task_goes_on_with_its_own_images_only(
    number: int, accepted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A new image changes the split into training and validation, so it may only arrive between tasks."""
    folder = killed_run(tmp_path / "run", "hat", number)
    given = SOURCES["tiny"]

    def with_one_more(spec: ImageSpec, data: str | None) -> Source:
        source = given(spec, data)
        one = source.test.of(source.classes[:1]).at(np.array([0]))
        return replace(source, train=join([source.train, one]))

    monkeypatch.setitem(SOURCES, "tiny", with_one_more)
    code = run(folder, "--resume")
    assert code == (0 if accepted else 2)
    assert ("its images have changed since; allowed: --resume" in capsys.readouterr().err) is not accepted
    monkeypatch.setitem(SOURCES, "tiny", given)
    assert run(folder, "--resume") == 0
