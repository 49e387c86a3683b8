"""The plan of a run is made from the command line and checked before training starts."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.helpers import TINY_PRESET, kill_at_save, run_tensors, use_tiny_preset
from tests.helpers_photos import write_photos
from training import fit
from training.config import Lesson, RunConfig
from training.data.reader import PixelReader
from training.data.sources import Sources
from training.fit import make_parser
from training.learn import plan
from training.learn.plan import TrainingPlan, how_to_continue, make_plan
from training.show.console import Reporter
from training.store.checkpoint import CURRENT, load, read_config, write_config


@pytest.fixture(autouse=True)
def tiny_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    use_tiny_preset(monkeypatch)


def write_classes(root: Path, **counts: int) -> Path:
    """Write this many noise images into each class folder."""
    generator = np.random.default_rng(0)
    for label, count in counts.items():
        (root / label).mkdir(parents=True)
        for number in range(count):
            Image.fromarray(generator.integers(0, 255, (8, 12), dtype=np.uint8)).save(root / label / f"{number}.png")
    return root


def stopped(*arguments: str, at: int = 1) -> None:
    """Run a command that is interrupted at a checkpoint, as by Ctrl-C."""
    with pytest.MonkeyPatch.context() as patch:
        kill_at_save(patch, at, written=True)
        assert fit.main(list(arguments)) == 130


# ---- classes that are too small


def test_a_class_that_is_too_small_is_found_before_anything_is_learned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_classes(tmp_path / "images", cat=4, dog=3, cow=2, pig=1)
    options = ["--preset", "digits", "--data", str(folder), "--out", str(tmp_path / "run")]
    assert fit.main([*options, "--tasks", "cat,dog; cow; pig"]) == 2
    error = capsys.readouterr().err
    assert "'cow' of task 1 has 1 to learn from and 1 to test on; 'pig' of task 2 has 0 to learn from and 1" in error
    assert "A class needs 2 to learn from, since one of them validates, and 1 to test on" in error
    assert "a folder that is split for you needs 3" in error
    assert not (tmp_path / "run").exists()
    # A class that is not learned may have any number of images.
    assert make_plan(make_parser().parse_args([*options, "--tasks", "cat,dog"])).config.labels == ("cat", "dog")


def test_a_class_that_shrank_is_found_before_a_run_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, run = write_classes(tmp_path / "images", cat=3, dog=3, cow=3), tmp_path / "run"
    stopped("--preset", "digits", "--data", str(folder), "--out", str(run))
    before = (run / CURRENT).read_bytes()
    (folder / "dog" / "0.png").unlink()
    assert fit.main(["--out", str(run), "--resume"]) == 2
    assert "'dog' of task 1 has 1 to learn from and 1 to test on" in capsys.readouterr().err
    assert (run / CURRENT).read_bytes() == before


# ---- misspelt classes


def read_nothing(patch: pytest.MonkeyPatch) -> None:
    """Make a test fail that opens a trunk or reads images."""
    for owner, name in ((plan, "open_trunk"), (plan, "learn_trunk"), (plan, "Encoder"), (PixelReader, "read")):
        patch.setattr(owner, name, lambda *_, **__: pytest.fail("the name of the class should have been checked"))


@pytest.mark.parametrize("trunk", ["efficientnet-lite0", "patches", "none"])
@pytest.mark.parametrize("inside", ["", "train"])
def test_a_misspelt_class_is_found_before_an_image_is_read(
    trunk: str, inside: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_photos(tmp_path / "photos" / inside, disc=3, dots=3)
    read_nothing(monkeypatch)
    words = ["--data", str(tmp_path / "photos"), "--trunk", trunk, "--out", str(tmp_path / "run")]
    assert fit.main([*words, "--tasks", "disc,dotts"]) == 2
    assert "no images of 'dotts'; the data has: disc, dots; did you mean 'dots'?" in capsys.readouterr().err


@pytest.mark.parametrize("trunk", ["patches", "none"])
def test_a_misspelt_class_that_is_added_is_found_before_an_image_is_read(
    trunk: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    photos, run = write_photos(tmp_path / "photos", disc=4, ring=4, dots=4), tmp_path / "run"
    small = ["--trunk-option", "count=20", "--size", "32"] if trunk == "patches" else ["--preset", "digits"]
    words = ["--data", str(photos), "--trunk", trunk, *small, "--tasks", "disc,ring"]
    assert fit.main([*words, "--out", str(run)]) == 0
    read_nothing(monkeypatch)
    capsys.readouterr()
    for data in ([], ["--data", str(photos)]):
        assert fit.add_task([str(run), "dotts", *data]) == 2
        assert "no images of 'dotts'; the data has: disc, dots, ring; did you mean 'dots'?" in capsys.readouterr().err


# ---- continuing a run


def advice(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The arguments of the command that a stopped run suggests."""
    command = capsys.readouterr().err.rpartition("stopped; continue with: ")[2]
    words = shlex.split(command)
    assert words[:2] == ["openworld", "fit"]
    return words[2:]


def test_ctrl_c_prints_the_command_to_continue(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, run = write_classes(tmp_path / "my images", cat=3, dog=3), tmp_path / "my run"
    options = ["--data", str(folder), "--classes-per-task", "1", "--seed", "3", "--log", "tensorboard"]
    stopped("--preset", "digits", *options, "--out", str(run))
    words = advice(capsys)
    assert words == ["--out", str(run), "--resume", "--log", "tensorboard"]
    moved = folder.rename(tmp_path / "moved")
    stopped(*words[:3], "--data", str(moved))
    words = advice(capsys)
    assert words == ["--out", str(run), "--resume", "--data", str(moved)]
    stopped(*words)
    assert load(run).progress.phase == "head", "a save a command: two epochs, and the end of the features"


@pytest.mark.parametrize(
    ("arguments", "command", "more"),
    [
        ("--quarantine sqlite:///q.db --publish shelf", "learn-unknowns {run}", "--publish shelf"),
        (
            "--quarantine postgresql://ann:secret@db/q --images s3",
            "fit --out {run}",
            "--quarantine 'postgresql://ann:***@db/q' --images s3",
        ),
        ("--resume --quarantine sqlite:///q.db", "fit --out {run}", "--quarantine sqlite:///q.db"),
        ("--log tensorboard --compile", "fit --out {run}", "--log tensorboard --compile"),
    ],
)
def test_the_command_to_continue_has_what_the_run_does_not_store(
    arguments: str, command: str, more: str, tmp_path: Path
) -> None:
    config = RunConfig(TINY_PRESET, 0, (Lesson((("zero",),), "tiny"),))
    begun = TrainingPlan(tmp_path, config, Sources(config))
    write_config(tmp_path, config)
    hint = how_to_continue(begun, make_parser().parse_args(shlex.split(arguments)))
    assert hint == f"continue with: openworld {command.format(run=tmp_path)} --resume {more}"


def test_a_run_that_had_not_begun_is_started_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(plan, "make_plan", stop)
    assert fit.main(["--out", str(tmp_path / "run")]) == 130
    assert "stopped; nothing was learned yet: run the same command again" in capsys.readouterr().err


# ---- places and sizes


@pytest.mark.parametrize("inside", ["", "run"])
def test_a_file_is_refused_as_the_run_folder(inside: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("kept")
    place = tmp_path / "file" / inside
    assert fit.main(["--out", str(place)]) == 2
    assert f"error: {place}: no run can be written there (" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "kept"


def test_images_and_network_may_have_another_size(tmp_path: Path) -> None:
    folder = write_classes(tmp_path / "images", cat=3, dog=3)
    stopped("--preset", "digits", "--data", str(folder), "--size", "12", "--width", "3", "--out", str(tmp_path / "run"))
    preset = read_config(tmp_path / "run").preset
    assert preset.image.shape == (12, 12, 1)
    assert (preset.network.height, preset.network.width, preset.network.base) == (12, 12, 3)
    first = next(value for name, value in run_tensors(tmp_path / "run").items() if name.endswith("0.conv.weight"))
    assert first.shape[:2] == (3, 1)


def test_images_are_read_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_classes(tmp_path / "images", cat=3, dog=3)
    (folder / "cat" / "notes.txt").write_text("no image")
    planned = make_plan(make_parser().parse_args(["--data", str(folder), "--out", str(tmp_path / "run")]))
    planned.sources.of(planned.config.lessons[0])
    assert caplog.text.count("1 files skipped") == 1


def test_a_printed_command_stays_on_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    command = f"next: openworld export {tmp_path}/[red] --out {tmp_path}/[red]/bundle"
    Reporter().print(command)
    time, _, text = capsys.readouterr().err.partition(" ")
    assert (len(time), text) == (len("12:34:56"), command + "\n")
