"""Every epoch of a run is in its history once. What a crash at any point leaves is tested in test_resume.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers import kill_at_save, use_tiny_preset
from training import fit
from training.store.checkpoint import Progress
from training.store.history import HISTORY, Epoch, History, without_places, without_secrets

ALL = [(task, phase, epoch) for task in (0, 1) for phase in ("features", "head") for epoch in (1, 2)]


def places(folder: Path) -> list[tuple[int, str, int]]:
    return [(epoch.task, epoch.phase, epoch.epoch) for epoch in History(folder).epochs]


@pytest.fixture(autouse=True)
def tiny_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    use_tiny_preset(monkeypatch)


def test_a_resumed_run_has_every_epoch_once_and_both_its_commands(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        # The epoch is in the history, and the checkpoint that would rest on it is not written.
        kill_at_save(patch, 7, written=False)
        assert fit.main(["--out", str(folder)]) == 130
    assert places(folder) == ALL[:5]
    assert fit.main(["--out", str(folder), "--resume"]) == 0
    assert places(folder) == ALL
    started = ["openworld", "fit", "--out", str(folder)]
    assert History(folder).commands == [started, [*started, "--resume"]]
    # A command that has nothing to learn is no part of the history.
    before = (folder / HISTORY).read_bytes()
    assert fit.main(["--out", str(folder), "--resume"]) == 0
    assert (folder / HISTORY).read_bytes() == before


def test_a_line_that_was_cut_off_is_dropped(tmp_path: Path) -> None:
    history = History(tmp_path)
    assert (history.epochs, history.commands) == ([], [])
    history.command(["learn"])
    epochs = [Epoch(0, "features", number, 1 / number, 0.5) for number in (1, 2)]
    for epoch in epochs:
        history.epoch(epoch)
    with (tmp_path / HISTORY).open("a") as file:
        file.write('{"task": 0, "phase": "fea')
    assert history.epochs == epochs
    history.rewind(Progress(epoch=2))
    history.epoch(Epoch(0, "features", 3, 0.25, 0.5))
    assert [epoch.epoch for epoch in history.epochs] == [1, 2, 3]
    assert all(json.loads(line) for line in (tmp_path / HISTORY).read_text().splitlines())
    history.rewind(Progress(epoch=1))
    assert (history.epochs, history.commands) == (epochs[:1], [["learn"]])


@pytest.mark.parametrize(
    ("progress", "kept"),
    [
        (Progress(), 0),
        (Progress(phase="features", epoch=1), 1),
        (Progress(phase="head", epoch=0), 2),
        (Progress(phase="head", epoch=2), 4),
        (Progress(task=1, epoch=1), 5),
        (Progress(task=2), 8),
    ],
)
def test_what_a_checkpoint_rests_on(progress: Progress, kept: int) -> None:
    assert [Epoch(*place, 0.0, 0.0).kept_by(progress) for place in ALL] == [True] * kept + [False] * (8 - kept)


def test_passwords_are_not_written_down(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.command(["--quarantine", "postgresql://me:s3cr:t@x@host:5432/db?sslpassword=s3cret&a=b"])
    assert history.commands == [["--quarantine", "postgresql://me:***@host:5432/db?sslpassword=***&a=b"]]
    assert "s3cr" not in (tmp_path / HISTORY).read_text()
    assert without_secrets("sqlite:////var/lib/q.db") == "sqlite:////var/lib/q.db"


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("fit --data /home/ada/x --tasks a,b --out=/srv/run", "fit --data FOLDER --tasks a,b --out=RUN"),
        ("fit --trunk onnx:/home/ada/net.onnx --seed 3", "fit --trunk onnx:FILE --seed 3"),
        ("fit --trunk=onnx:/home/ada/net.onnx", "fit --trunk=onnx:FILE"),
        (
            "learn-unknowns /srv/run --publish /srv/shelf --quarantine q",
            "learn-unknowns RUN --publish SHELF --quarantine URL",
        ),
    ],
)
def test_a_command_for_others_names_no_place(command: str, shown: str) -> None:
    assert without_places(["openworld", *command.split()]) == f"openworld {shown}"
