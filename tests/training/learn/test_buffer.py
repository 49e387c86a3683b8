"""A run stores no image, or exactly those of its buffer."""

from __future__ import annotations

import base64
import io
import json
import re
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import load_file

from tests.helpers import (
    HELD_OUT,
    assert_same_tensors,
    kill_at_save,
    run_tensors,
    tiny_source,
    tiny_task,
    use_tiny_preset,
)
from tests.helpers_process import die_at_call, ended, forks
from training import fit
from training.config import Lesson, RunConfig
from training.learn import learner
from training.learn.buffer import Buffer, keep_some, quota
from training.presets import choose_preset
from training.report_page import main as write_page
from training.run import open_run
from training.show import plots
from training.show.page import PAGE
from training.store.checkpoint import load

SIZE = 9


@pytest.fixture(autouse=True)
def tiny_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    use_tiny_preset(monkeypatch)


@pytest.fixture(scope="module")
def kept_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return learned(tmp_path_factory.mktemp("kept") / "run", "--buffer", str(SIZE))


def learned(folder: Path, *more: str) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        use_tiny_preset(patch)
        assert fit.main(["--out", str(folder), *more]) == 0
    return folder


def kept(before: Buffer | None, task: int, size: int, seed: int = 0) -> Buffer:
    return keep_some(before, task, tiny_task(1, seed=task, per_class=8).train, 2, size, seed)


def counts(buffer: Buffer) -> list[int]:
    return torch.bincount(buffer.class_ids).tolist()


def test_a_buffer_is_balanced_over_the_classes_seen_so_far() -> None:
    first = kept(None, 0, 9)
    second = kept(first, 1, 9)
    third = kept(second, 2, 9)
    assert [counts(buffer) for buffer in (first, second, third)] == [[5, 4], [3, 2, 2, 2], [2, 2, 2, 1, 1, 1]]
    assert [len(buffer) for buffer in (first, second, third)] == [9, 9, 9]


def test_a_class_that_shrinks_keeps_some_of_the_images_it_had() -> None:
    first = kept(None, 0, 9)
    second = kept(first, 1, 9)
    for class_id in (0, 1):
        had = {bytes(image.numpy()) for image in first.pixels[first.class_ids == class_id]}
        has = {bytes(image.numpy()) for image in second.pixels[second.class_ids == class_id]}
        assert has < had


def test_images_keep_their_classes() -> None:
    data = tiny_task(1, per_class=8).train
    buffer = keep_some(None, 0, data, 2, 6, 0)
    for image, class_id in zip(buffer.pixels, buffer.class_ids, strict=True):
        place = int((data.pixels == image).flatten(1).all(dim=1).nonzero())
        assert data.local_classes[place] == class_id


def test_a_class_with_few_images_gives_all_it_has() -> None:
    few = tiny_task(1, per_class=2).train
    assert counts(keep_some(None, 0, few, 2, 100, 0)) == [2, 2]


def test_the_choice_depends_on_the_seed() -> None:
    assert torch.equal(kept(None, 0, 6).pixels, kept(None, 0, 6).pixels)
    assert not torch.equal(kept(None, 0, 6).pixels, kept(None, 0, 6, seed=1).pixels)


def test_quotas_add_up() -> None:
    for classes in range(1, 12):
        assert sum(quota(20, classes, class_id) for class_id in range(classes)) == 20


def test_a_buffer_too_small_for_its_classes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"buffer is 2; allowed: 0, or one or more per class \(3\)"):
        RunConfig(choose_preset("digits", "hat"), 0, (Lesson((("a", "b", "c"),), "digits"),), buffer=2)
    with pytest.raises(ValueError, match="buffer is -1; allowed: 0 or more images"):
        RunConfig(choose_preset("digits", "hat"), 0, (Lesson((("a",),), "digits"),), buffer=-1)


# ---- what lies in a run directory


def every_image() -> NDArray[np.uint8]:
    """Those that are learned from and those that are tested on."""
    source = tiny_source()
    return np.concatenate([source.train.pixels[source.train.labels != HELD_OUT], source.test.pixels])


def shown_in(page: Path) -> set[bytes]:
    """The pixels of every picture of a page."""
    pictures = re.findall(r"data:image/png;base64,([A-Za-z0-9+/=]+)", page.read_text())
    return {Image.open(io.BytesIO(base64.b64decode(picture))).tobytes() for picture in pictures}


def images_found(folder: Path) -> int:
    """How many of the data set's images lie somewhere in a run's files, as bytes or as numbers of any kind."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    raw = [path.read_bytes() for path in files]
    stored = [tensor.numpy() for path in files if path.suffix == ".safetensors" for tensor in load_file(path).values()]
    vectors = [
        values.reshape(-1, 64).astype(np.float64)
        for values in stored
        if values.dtype != bool and values.size % 64 == 0 and values.size
    ]
    found = 0
    for image in every_image():
        flat = image.ravel().astype(np.float64)
        in_bytes = any(bytes(image) in content for content in raw)
        # Scaled or shifted in any way, an image is still perfectly correlated with itself.
        as_numbers = any((np.abs(_correlation(rows, flat)) > 0.999).any() for rows in vectors)
        found += in_bytes or as_numbers
    return found


def _correlation(rows: NDArray[np.float64], image: NDArray[np.float64]) -> NDArray[np.float64]:
    rows = rows - rows.mean(axis=1, keepdims=True)
    image = image - image.mean()
    size = np.linalg.norm(rows, axis=1) * np.linalg.norm(image)
    return rows @ image / np.maximum(size, 1e-12)


@pytest.mark.parametrize("loss", ["csi", "ce"])
def test_a_run_without_a_buffer_stores_no_image(loss: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Curves take long to draw, and show no image.
    monkeypatch.setattr(plots, "svg", lambda *_, **__: "")
    folder = learned(tmp_path / "run", "--loss", loss)
    assert write_page([str(folder)]) == 0
    shown, source = shown_in(folder / PAGE), tiny_source()
    assert shown, "some are always mistaken"
    assert shown <= set(map(bytes, source.test.pixels)) - set(map(bytes, source.train.pixels))
    assert images_found(folder) == 0
    assert not any(name.startswith("buffer.") for name in run_tensors(folder))
    assert open_run(folder, torch.device("cpu")).corrections == ()


def test_a_run_with_a_buffer_stores_as_many_images_as_configured(kept_run: Path) -> None:
    (kept_run / "checkpoint.previous.safetensors").unlink(missing_ok=True)
    assert images_found(kept_run) == SIZE
    buffer = load(kept_run).buffer()
    assert buffer is not None
    assert counts(buffer) == [3, 2, 2, 2]


def test_a_buffer_changes_nothing_of_what_is_learned(kept_run: Path, tmp_path: Path) -> None:
    plain = learned(tmp_path / "run")
    with_buffer = {name: value for name, value in run_tensors(kept_run).items() if not name.startswith("buffer.")}
    assert_same_tensors(with_buffer, run_tensors(plain))
    assert load(kept_run).progress.nats == load(plain).progress.nats


def test_every_task_leaves_a_correction_for_all_tasks_so_far(kept_run: Path) -> None:
    run = open_run(kept_run, torch.device("cpu"))
    assert [len(row) for row in run.correction_history] == [1, 2]
    assert run.corrections == run.correction_history[-1]
    assert json.loads((kept_run / "config.json").read_text())["buffer"] == SIZE


@forks
def test_a_run_killed_with_signal_9_keeps_the_same_images(kept_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def learn_and_die() -> None:
        # The second task's images are chosen, and nothing of that is written.
        die_at_call(learner, "keep_some", 2, after=True)
        fit.main(["--out", str(folder), "--buffer", str(SIZE)])

    assert ended(learn_and_die) == -signal.SIGKILL
    half = load(folder).buffer()
    assert half is not None
    assert counts(half) == [5, 4]
    assert fit.main(["--out", str(folder), "--resume"]) == 0
    assert_same_tensors(run_tensors(folder), run_tensors(kept_run))
    assert load(folder).progress.corrections == load(kept_run).progress.corrections


CE_SAVES = 8
"""Checkpoints of a run with cross-entropy: two tasks, each with 2 epochs, its features, what follows them."""


def test_a_run_of_cross_entropy_killed_after_a_save_ends_the_same(tmp_path: Path) -> None:
    options = ["--loss", "ce", "--buffer", str(SIZE)]
    whole = learned(tmp_path / "whole", *options)
    for number in (1, 3, 4, CE_SAVES):
        folder = tmp_path / f"killed after {number}"
        with pytest.MonkeyPatch.context() as patch:
            kill_at_save(patch, number, written=True)
            assert fit.main(["--out", str(folder), *options]) == 130
        assert fit.main(["--out", str(folder), "--resume"]) == 0
        assert_same_tensors(run_tensors(folder), run_tensors(whole))
        assert load(folder).progress.corrections == load(whole).progress.corrections
