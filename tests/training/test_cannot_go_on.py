"""A run that cannot continue prints the reason, and its earlier checkpoints are kept."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import use_tiny_preset
from tests.helpers_process import little_room
from training import fit
from training.learn import features as representation
from training.learn import fitting, learner
from training.show.page import PAGE
from training.store.checkpoint import CURRENT, METRICS, load
from training.store.history import HISTORY, History


@pytest.fixture(autouse=True)
def tiny_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    use_tiny_preset(monkeypatch)


def spoil(patch: pytest.MonkeyPatch, step: int, *, loss: float, slope: float) -> None:
    """Replace the loss of one optimiser step of step 1, with gradients multiplied by `slope`."""
    real, count = representation.supervised_contrastive, 0

    def spoiled(*arguments: Any) -> torch.Tensor:
        nonlocal count
        count += 1
        value = real(*arguments)
        if count == step:
            value.register_hook(lambda gradient: gradient * slope)
            value = value + (loss - value.detach())
        return value

    patch.setattr(representation, "supervised_contrastive", spoiled)


# An epoch has two batches and a task two epochs: these are steps of the second task's second epoch.
@pytest.mark.parametrize(
    ("step", "loss", "slope", "problem"),
    [
        (7, float("nan"), 1.0, "the loss is nan"),
        (8, float("inf"), 1.0, "the loss is inf"),
        (8, 1.0, float("nan"), "the last step left weights that are not finite"),
    ],
    ids=["a loss", "the last loss", "the last step"],
)
def test_nan_and_infinity_are_never_checkpointed(
    step: int,
    loss: float,
    slope: float,
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with monkeypatch.context() as patch:
        spoil(patch, step, loss=loss, slope=slope)
        assert fit.main(["--out", str(tmp_path)]) == 2
    assert f"error: task 1, features, epoch 2: {problem}; allowed: finite numbers" in capsys.readouterr().err
    kept = load(tmp_path)
    assert (kept.progress.task, kept.progress.phase, kept.progress.epoch) == (1, "features", 1)
    assert all(value.isfinite().all() for value in kept.tensors.values())
    # The cause is gone here, so the run resumes from there, and its history contains every epoch once.
    assert fit.main(["--out", str(tmp_path), "--resume"]) == 0
    assert len(History(tmp_path).epochs) == 8


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fail_at_checkpoint(patch: pytest.MonkeyPatch) -> None:
    """The disk is full in the middle of the third checkpoint."""
    real, count = learner.save, 0

    def save(*arguments: Any) -> None:
        nonlocal count
        count += 1
        with little_room(4096) if count == 3 else nullcontext():
            real(*arguments)

    patch.setattr(learner, "save", save)


FULL: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    CURRENT: fail_at_checkpoint,
    HISTORY: lambda patch: patch.setattr(History, "epoch", full),
    METRICS: lambda patch: patch.setattr(fitting, "write_json", full),
    PAGE: lambda patch: patch.setattr(fitting, "write_page", full),
}


@pytest.mark.parametrize("name", FULL)
def test_a_full_disk_is_an_error_message_and_the_run_resumes_once_there_is_space(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        FULL[name](patch)
        assert fit.main(["--out", str(tmp_path)]) == 2
    printed = capsys.readouterr().err
    assert f"error: {tmp_path / name}: could not be written (" in printed
    assert ("File too large" if name == CURRENT else "No space left on device") in printed
    assert f"free some space, then resume with `openworld fit --out {tmp_path} --resume`" in printed
    if name == CURRENT:
        assert load(tmp_path).progress.epoch == 2
    assert fit.main(["--out", str(tmp_path), "--resume"]) == 0
    assert len(History(tmp_path).epochs) == 8
