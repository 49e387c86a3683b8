"""Where the course of learning goes besides RUN/history.jsonl: `--log tensorboard`, `--log mlflow`.

A tracker is opened with the epochs that the run has behind it, so one that is asked for late, or resumed after a
crash, shows all of them, and each once.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from training.checkpoint import Progress, RunError
from training.config import RunConfig
from training.history import Epoch, History


class Tracker(Protocol):
    """Takes what a run says of itself while it learns."""

    def epoch(self, epoch: Epoch) -> None: ...
    def measured(self, result: Mapping[str, Any]) -> None:
        """The content of RUN/metrics.json, when all is learned."""


def curve_of(epoch: Epoch) -> str:
    """The name of the curve that an epoch's loss belongs to."""
    return f"loss/task{epoch.task}/{epoch.phase}"


def scalars(result: Mapping[str, Any]) -> dict[str, float]:
    """The numbers among metrics, by name; those of a group as group/name. Lists are left to metrics.json."""
    flat: dict[str, float] = {}
    for name, value in result.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}/{inner}": number for inner, number in scalars(value).items()}
        elif isinstance(value, int | float) and not isinstance(value, bool):
            flat[name] = float(value)
    return flat


def after_each_task(result: Mapping[str, Any]) -> Iterable[tuple[str, float, int]]:
    """Name, value and task of what was measured after each task."""
    for task, accuracies in enumerate(result["after_each_task"]):
        for name, value in scalars(accuracies).items():
            yield f"after_each_task/{name}", value, task


class TensorBoard:
    """Event files in RUN/tensorboard: `tensorboard --logdir RUN/tensorboard`."""

    def __init__(self, folder: Path, config: RunConfig, epochs: Sequence[Epoch]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        place = folder / "tensorboard"
        # Events cannot be taken back, so what is there is written anew from the history.
        for file in place.glob("events.out.tfevents.*"):
            file.unlink()
        self._writer = SummaryWriter(str(place))
        for epoch in epochs:
            self.epoch(epoch)

    def epoch(self, epoch: Epoch) -> None:
        self._writer.add_scalar(curve_of(epoch), epoch.loss, epoch.epoch)

    def measured(self, result: Mapping[str, Any]) -> None:
        for name, value in scalars(result).items():
            self._writer.add_scalar(f"metrics/{name}", value, 0)
        for name, value, task in after_each_task(result):
            self._writer.add_scalar(name, value, task)
        self._writer.close()


class MLflow:
    """One MLflow run, in RUN/mlflow/mlflow.db or on the server that MLFLOW_TRACKING_URI names."""

    def __init__(self, folder: Path, config: RunConfig, epochs: Sequence[Epoch]) -> None:
        # Whoever trains here decides what leaves the machine; read when mlflow is imported.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow.tracking import MlflowClient

        logging.getLogger("mlflow").setLevel(logging.WARNING)  # how it makes its tables is nobody's concern
        place = (folder / "mlflow").resolve()
        place.mkdir(exist_ok=True)
        self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{place / 'mlflow.db'}")
        self._run = self._resumed(place) or self._new(place, folder.name, config)
        (place / "run_id").write_text(self._run)
        self._logged: set[tuple[str, int]] = {
            (name, metric.step)
            for name in {curve_of(epoch) for epoch in epochs}
            for metric in self._client.get_metric_history(self._run, name)
        }
        for epoch in epochs:
            self.epoch(epoch)

    def _resumed(self, place: Path) -> str | None:
        """The run that was logged to before, if it is still there."""
        from mlflow.exceptions import MlflowException

        try:
            run = (place / "run_id").read_text()
            self._client.update_run(run, status="RUNNING")
        except (FileNotFoundError, MlflowException):
            return None
        return run

    def _new(self, place: Path, name: str, config: RunConfig) -> str:
        experiment = self._client.get_experiment_by_name("openworld")
        number = experiment.experiment_id if experiment else self._client.create_experiment("openworld")
        run = str(self._client.create_run(number, run_name=name).info.run_id)
        for key, value in {"preset": config.preset.name, "method": config.method, "seed": config.seed}.items():
            self._client.log_param(run, key, value)
        return run

    def epoch(self, epoch: Epoch) -> None:
        if (place := (curve_of(epoch), epoch.epoch)) not in self._logged:
            self._logged.add(place)
            self._client.log_metric(self._run, place[0], epoch.loss, step=place[1])

    def measured(self, result: Mapping[str, Any]) -> None:
        for name, value in scalars(result).items():
            self._client.log_metric(self._run, name, value)
        for name, value, task in after_each_task(result):
            self._client.log_metric(self._run, name, value, step=task)
        self._client.set_terminated(self._run)


class Kind(NamedTuple):
    """A tracker that can be asked for, and the packages that its extra of the same name brings."""

    make: Callable[[Path, RunConfig, Sequence[Epoch]], Tracker]
    packages: tuple[str, ...]


TRACKERS = {"tensorboard": Kind(TensorBoard, ("tensorboard",)), "mlflow": Kind(MLflow, ("mlflow", "alembic"))}


def check_installed(names: Iterable[str]) -> None:
    """Before anything is learned: a tracker whose packages are absent is refused, by the name of its extra."""
    for name in names:
        for package in TRACKERS[name].packages:
            if importlib.util.find_spec(package) is None:
                raise RunError(f"--log {name} needs the package {package}: pip install 'openworld[{name}]'")


log = logging.getLogger(__name__)


class Tracking:
    """The history of a run, and the trackers that were asked for; one that fails is left, and learning goes on."""

    def __init__(self, folder: Path, config: RunConfig, names: Sequence[str] = ()) -> None:
        self._folder = folder
        self._config = config
        self._names = list(dict.fromkeys(names))
        self._history = History(folder)
        self._trackers: dict[str, Tracker] = {}

    def begin(self, progress: Progress, command: Sequence[str]) -> None:
        """Go on where the checkpoint is, for the command that was given."""
        self._history.rewind(progress)
        if progress.task < len(self._config.tasks):
            self._history.command(command)
        epochs = self._history.epochs
        for name in self._names:
            with self._left_if_it_fails(name):
                self._trackers[name] = TRACKERS[name].make(self._folder, self._config, epochs)

    def epoch(self, epoch: Epoch) -> None:
        self._history.epoch(epoch)
        for name, tracker in list(self._trackers.items()):
            with self._left_if_it_fails(name):
                tracker.epoch(epoch)

    def measured(self, result: Mapping[str, Any]) -> None:
        """The last that a run says of itself."""
        for name, tracker in list(self._trackers.items()):
            with self._left_if_it_fails(name):
                tracker.measured(result)

    @contextmanager
    def _left_if_it_fails(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # what a tracker's server, database or disk raises is its own affair
            self._trackers.pop(name, None)
            log.warning(
                "--log %s failed and is left for now (%s: %s); the history has everything, and the next "
                "--resume --log %s catches up",
                name,
                type(error).__name__,
                error,
                name,
            )
