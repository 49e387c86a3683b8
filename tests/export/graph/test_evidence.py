"""Only a task's own validation images are evidence; missing or changed images are reported."""

from __future__ import annotations

import copy
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from export import exporter
from export.__main__ import main
from export.graph import evidence as evidence_module
from export.graph.evidence import evenly, gather
from tests.export.conftest import Exported
from tests.export.networks import learned, put_run, run_of
from tests.helpers import use_tiny_preset
from training.config import Lesson
from training.data.sources import Sources
from training.data.tasks import TaskData, task_data
from training.learn.measurements import task_measurements
from training.run import Run

PHOTOS = 30


def put_photos(folder: Path, numbers: range) -> None:
    """Noise images with different brightness, named by number."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in numbers:
        generator = np.random.default_rng([number, *folder.name.encode()])
        noise = generator.integers(0, generator.integers(20, 256), (8, 8), dtype=np.uint8)
        Image.fromarray(noise).save(folder / f"{number:03}.png")


def data_of(run: Run, task: int) -> TaskData:
    return task_data(Sources(run.config).of(run.config.lesson_of(task)), run.config, task, torch.device("cpu"))


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return tmp_path / "photos"


@pytest.fixture
def validated(photos: Path) -> Run:
    """A run of two tasks, each of which remembers its validation images among those of its class folders."""
    network = copy.deepcopy(learned("hat", "convnet", (2, 3)))
    run = run_of(network)
    lesson = Lesson(run.config.tasks, "folder", str(photos))
    run = replace(run, config=replace(run.config, lessons=(lesson,)))
    for label in lesson.labels:
        put_photos(photos / label, range(PHOTOS))
    for task in range(2):
        pixels = data_of(run, task).validation.pixels
        network.detector(task).remember(task_measurements(network, task, pixels))
    return run


def test_every_tasks_validation_images_are_gathered(validated: Run) -> None:
    evidence = gather(validated)
    assert evidence.missing == ()
    assert np.bincount(evidence.tasks).tolist() == [len(data_of(validated, task).validation) for task in range(2)]
    wanted = torch.cat([data_of(validated, task).validation.pixels for task in range(2)]).permute(0, 2, 3, 1)
    np.testing.assert_array_equal(evidence.pixels, wanted.numpy())


def test_a_real_run_remembers_what_it_was_validated_by(exported: Exported, monkeypatch: pytest.MonkeyPatch) -> None:
    use_tiny_preset(monkeypatch)
    evidence = gather(exported.run)
    assert evidence.missing == ()
    assert np.bincount(evidence.tasks).tolist() == [8, 8]


def test_of_many_images_each_task_gives_as_many_as_another_while_it_can(
    validated: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = gather(validated)
    monkeypatch.setattr(evidence_module, "MOST_IMAGES", 10)
    some = gather(validated)
    assert (np.bincount(some.tasks).tolist(), some.missing) == ([5, 5], ())
    assert (every.left_out, some.left_out) == (0, len(every) - 10)
    own = {image.tobytes(): int(task) for image, task in zip(every.pixels, every.tasks, strict=True)}
    assert [own[image.tobytes()] for image in some.pixels] == some.tasks.tolist()
    np.testing.assert_array_equal(gather(validated).pixels, some.pixels)


def test_what_a_small_task_cannot_give_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence_module, "MOST_IMAGES", 20)
    assert {task: len(chosen) for task, chosen in evenly({0: 3, 2: 50, 3: 9}).items()} == {0: 3, 2: 9, 3: 8}
    assert evenly({1: 4})[1].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("limit", [None, 5])
def test_a_task_whose_class_folders_are_gone_is_named(limit: int | None, validated: Run, photos: Path) -> None:
    preset = replace(validated.config.preset, images_per_class=limit)
    run = replace(validated, config=replace(validated.config, preset=preset))
    for label in run.config.tasks[0]:
        shutil.rmtree(photos / label)
    evidence = gather(run)
    assert evidence.missing[0] == "task 0: no image of 'class 0', 'class 1' is left"
    assert 0 not in evidence.tasks


def test_a_task_that_lost_one_of_its_classes_is_no_evidence(validated: Run, photos: Path) -> None:
    shutil.rmtree(photos / "class 3")
    evidence = gather(validated)
    assert evidence.missing == ("task 1: no image of 'class 3' is left",)
    assert set(evidence.tasks.tolist()) == {0}


def test_a_run_whose_images_are_all_gone_has_no_evidence(validated: Run, photos: Path) -> None:
    shutil.rmtree(photos)
    evidence = gather(validated)
    assert (len(evidence), len(evidence.missing)) == (0, 2)
    assert evidence.pixels.shape == (0, 8, 8, 1)


def test_one_photo_more_makes_no_training_image_a_validation_image(validated: Run, photos: Path) -> None:
    before = data_of(validated, 0)
    trained = {image.numpy().tobytes() for image in before.train.pixels}
    put_photos(photos / "class 0", range(PHOTOS, PHOTOS + 1))
    now = data_of(validated, 0).validation.pixels
    assert len(now) == len(before.validation)
    assert any(image.numpy().tobytes() in trained for image in now)
    evidence = gather(validated)
    assert evidence.missing == ("task 0: its images have changed since it was learned",)
    assert set(evidence.tasks.tolist()) == {1}


def test_other_photos_under_the_same_names_are_no_evidence(validated: Run, photos: Path) -> None:
    shutil.rmtree(photos / "class 4")
    shutil.copytree(photos / "class 2", photos / "class 4")
    assert gather(validated).missing == ("task 1: its images have changed since it was learned",)


def test_fewer_photos_are_no_evidence(validated: Run, photos: Path) -> None:
    for number in range(6):
        (photos / "class 2" / f"{number:03}.png").unlink()
    assert gather(validated).missing == ("task 1: its images have changed since it was learned",)


def test_a_run_without_its_class_folders_is_exported_with_a_note(
    validated: Run, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for label in validated.config.tasks[0]:
        shutil.rmtree(photos / label)
    folder = put_run(monkeypatch, tmp_path / "run", validated)
    monkeypatch.setattr(exporter, "gather", gather)
    assert main([str(folder), "--out", str(tmp_path / "bundle")]) == 0
    note = "note: no validation images of task 0: no image of 'class 0', 'class 1' is left\n"
    assert capsys.readouterr().err == note
