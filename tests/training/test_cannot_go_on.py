"""A run that cannot go on says why, and what it learned before is kept."""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import use_tiny_preset
from training import fit, representation
from training.checkpoint import CURRENT, METRICS, load
from training.history import HISTORY, History
from training.report_page import PAGE


@pytest.fixture(autouse=True)
def tiny_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    use_tiny_preset(monkeypatch)


def spoil(patch: pytest.MonkeyPatch, step: int, *, loss: float, slope: float) -> None:
    """Let one step of step 1 see such a loss, with gradients that are multiplied by `slope`."""
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


# Two batches make an epoch and two epochs a task: these are steps of the second task's second epoch.
@pytest.mark.parametrize(
    ("step", "loss", "slope", "said"),
    [
        (7, float("nan"), 1.0, "the loss is nan"),
        (8, float("inf"), 1.0, "the loss is inf"),
        (8, 1.0, float("nan"), "the last step left weights that are no numbers"),
    ],
    ids=["a loss", "the last loss", "the last step"],
)
def test_numbers_that_are_none_reach_no_checkpoint(
    step: int,
    loss: float,
    slope: float,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with monkeypatch.context() as patch:
        spoil(patch, step, loss=loss, slope=slope)
        assert fit.main(["--out", str(tmp_path)]) == 2
    assert f"error: task 1, features, epoch 2: {said}; allowed: finite numbers" in capsys.readouterr().err
    kept = load(tmp_path)
    assert (kept.progress.task, kept.progress.phase, kept.progress.epoch) == (1, "features", 1)
    assert all(value.isfinite().all() for value in kept.tensors.values())
    # Where the cause is gone, as it is here, the run goes on from there, and its history holds every epoch once.
    assert fit.main(["--out", str(tmp_path), "--resume"]) == 0
    assert len(History(tmp_path).epochs) == 8


@contextmanager
def little_room(size: int) -> Iterator[None]:
    """As if the disk were full: no file can grow beyond so many bytes."""
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fail_at_checkpoint(patch: pytest.MonkeyPatch) -> None:
    """The disk is full in the middle of the third checkpoint."""
    real, count = fit.save, 0

    def save(*arguments: Any) -> None:
        nonlocal count
        count += 1
        with little_room(4096) if count == 3 else nullcontext():
            real(*arguments)

    patch.setattr(fit, "save", save)


FULL: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    CURRENT: fail_at_checkpoint,
    HISTORY: lambda patch: patch.setattr(History, "epoch", full),
    METRICS: lambda patch: patch.setattr(fit, "write_json", full),
    PAGE: lambda patch: patch.setattr(fit, "write_page", full),
}


@pytest.mark.parametrize("name", FULL)
def test_a_full_disk_is_said_in_words_and_the_run_goes_on_once_there_is_room(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        FULL[name](patch)
        assert fit.main(["--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert f"error: {tmp_path / name}: could not be written (" in said
    assert ("File too large" if name == CURRENT else "No space left on device") in said
    assert f"free some space, then go on with `python -m training.fit --out {tmp_path} --resume`" in said
    if name == CURRENT:
        assert load(tmp_path).progress.epoch == 2
    assert fit.main(["--out", str(tmp_path), "--resume"]) == 0
    assert len(History(tmp_path).epochs) == 8
