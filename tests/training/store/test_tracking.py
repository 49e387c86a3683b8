"""Losses and metrics in TensorBoard and MLflow: all of them, each once, also when asked for late."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from tests.helpers import TINY_PRESET, kill_at_save, use_tiny_preset
from training import fit
from training.config import Lesson, RunConfig
from training.store import tracking
from training.store.checkpoint import Progress, read_config
from training.store.history import HISTORY, PHASES, Epoch, History
from training.store.tracking import TRACKERS, MLflow, TrackerKind, Tracking, WandB, curve_of, scalars

if TYPE_CHECKING:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

OLD = RunConfig(TINY_PRESET, 0, (Lesson((("zero", "one"),), "tiny"),))
PATIENCE = 30.0
CURVES = {f"loss/task{task}/{phase}": [1, 2] for task in (0, 1) for phase in ("features", "head")}


@pytest.fixture(autouse=True)
def tiny_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    use_tiny_preset(monkeypatch)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def tensorboard_of(folder: Path) -> EventAccumulator:
    # Every process that runs tests collects all of them, and this takes long to import.
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return events


def test_tensorboard_has_every_epoch_of_a_resumed_run_once(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        kill_at_save(patch, 5, written=False)
        assert fit.main(["--out", str(folder)]) == 130
    assert fit.main(["--out", str(folder), "--resume", "--log", "tensorboard"]) == 0
    events = tensorboard_of(folder)
    tags = events.Tags()["scalars"]
    assert {tag: [event.step for event in events.Scalars(tag)] for tag in tags if tag.startswith("loss/")} == CURVES
    history = History(folder).epochs
    assert [events.Scalars(curve_of(epoch))[epoch.epoch - 1].value for epoch in history] == pytest.approx(
        [epoch.loss for epoch in history]
    )
    measured = json.loads((folder / "metrics.json").read_text())
    assert events.Scalars("metrics/cil_accuracy")[0].value == pytest.approx(measured["cil_accuracy"])
    assert events.Scalars("metrics/unknown/auroc")[0].value == pytest.approx(measured["unknown"]["auroc"])
    assert [event.value for event in events.Scalars("after_each_task/til_accuracy")] == pytest.approx(
        [each["til_accuracy"] for each in measured["after_each_task"]]
    )


@pytest.mark.long
def test_wandb_has_every_epoch_and_the_metrics_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real package, which writes a file that `wandb sync` uploads; nothing is sent."""
    pytest.importorskip("wandb")
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_PROJECT", "WANDB_DIR", "WANDB_NAME"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "run"
    (folder / "wandb/offline-run-1-abc").mkdir(parents=True)
    epochs = [Epoch(task, phase, epoch, 0.5, 1.0) for task in (0, 1) for phase in PHASES for epoch in (1, 2)]
    again = WandB(folder, OLD, epochs[:7])
    again.epoch(epochs[7])
    again.measured({"cil_accuracy": 0.75, "unknown": {"auroc": 0.9}, "after_each_task": [{"til_accuracy": 0.5}]})
    # A run that was begun before is written again, so that every epoch is there once.
    (log,) = (folder / "wandb").glob("offline-run-*/run-*.wandb")
    deadline = time.monotonic() + PATIENCE
    # Another process of wandb writes the file, and may be a moment behind.
    while b"after_each_task/til_accuracy" not in (content := log.read_bytes()) and time.monotonic() < deadline:
        time.sleep(0.05)
    for curve in CURVES:
        assert content.count(curve.encode()) >= 2
    for name in (b"cil_accuracy", b"unknown/auroc", b"after_each_task/til_accuracy"):
        assert name in content


@pytest.mark.long
def test_mlflow_goes_on_with_its_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert fit.main(["--out", str(folder)]) == 0
    config, epochs = read_config(folder), History(folder).epochs
    MLflow(folder, config, epochs[:2])
    again = MLflow(folder, config, epochs[:1])
    for epoch in epochs[1:]:
        again.epoch(epoch)
    measured = json.loads((folder / "metrics.json").read_text())
    again.measured(measured)

    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{folder / 'mlflow' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("openworld")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    steps = {name: sorted(m.step for m in client.get_metric_history(found.info.run_id, name)) for name in CURVES}
    assert steps == CURVES
    assert found.info.status == "FINISHED"
    assert found.data.params == {"preset": "digits", "method": "hat", "seed": "0"}
    assert found.data.metrics["unknown/oscr"] == measured["unknown"]["oscr"]


class Failing:
    """A tracker that works for one epoch, and counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def epoch(self, epoch: Epoch) -> None:
        self.asked += 1
        if self.asked > 1:
            raise ConnectionError("the server is gone")

    def measured(self, result: Mapping[str, Any]) -> None:
        raise AssertionError("it was left")


def test_a_tracker_that_fails_is_left_and_learning_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing = Failing()
    monkeypatch.setitem(TRACKERS, "mlflow", TrackerKind(lambda *_: failing, ()))
    kept = Tracking(tmp_path, OLD, ["mlflow"])
    kept.begin(Progress(), ["learn"])
    for number in (1, 2, 3):
        kept.epoch(Epoch(0, "features", number, 0.5, 0.1))
    kept.measured({})
    assert failing.asked == 2
    assert caplog.text.count("--log mlflow failed and is disabled for now (ConnectionError: the server is gone)") == 1
    assert [epoch.epoch for epoch in History(tmp_path).epochs] == [1, 2, 3]


def test_a_tracker_that_cannot_begin_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> NoReturn:
        raise ConnectionError("no server")

    monkeypatch.setitem(TRACKERS, "mlflow", TrackerKind(refuse, ()))
    kept = Tracking(tmp_path, OLD, ["mlflow"])
    kept.begin(Progress(), ["learn"])
    kept.epoch(Epoch(0, "features", 1, 0.5, 0.1))
    assert caplog.text.count("--log mlflow failed") == 1


@pytest.mark.parametrize("name", ["tensorboard", "mlflow", "wandb"])
def test_a_tracker_that_is_not_installed_is_refused_before_anything_is_learned(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = importlib.util.find_spec

    def find_spec(wanted: str, *more: Any) -> Any:
        return None if wanted == name else real(wanted, *more)

    monkeypatch.setattr(tracking.importlib.util, "find_spec", find_spec)
    assert fit.main(["--out", str(tmp_path / "run"), "--log", name]) == 2
    assert f"--log {name} needs the package {name}: pip install -e '.[{name}]'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_without_trackers_there_is_the_history(tmp_path: Path) -> None:
    kept = Tracking(tmp_path, OLD)
    kept.begin(Progress(), ["learn"])
    kept.epoch(Epoch(0, "features", 1, 0.5, 0.1))
    kept.measured({})
    assert History(tmp_path).epochs[-1].loss == 0.5
    assert [path.name for path in tmp_path.iterdir()] == [HISTORY]


def test_scalars_are_the_numbers_among_metrics() -> None:
    result = {"method": "hat", "seed": 3, "right": True, "none": None, "rows": [1.0], "unknown": {"auroc": 0.5}}
    assert scalars(result) == {"seed": 3.0, "unknown/auroc": 0.5}
