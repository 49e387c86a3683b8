"""Trackers of a training run besides RUN/history.jsonl: `--log tensorboard`, `--log mlflow`, `--log wandb`.

A tracker gets the run's past epochs when it is opened. So a tracker that is added late, or resumed after a crash, shows
every epoch once.
"""

import importlib.util
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from training.config import RunConfig
from training.store.checkpoint import Progress, RunError
from training.store.history import Epoch, History

log = logging.getLogger(__name__)


class Tracker(Protocol):
    """Receives the epochs of a run, and the content of RUN/metrics.json at its end."""

    def epoch(self, epoch: Epoch) -> None: ...
    def measured(self, result: Mapping[str, Any]) -> None: ...


def curve_of(epoch: Epoch) -> str:
    return f"loss/task{epoch.task}/{epoch.phase}"


def scalars(result: Mapping[str, Any]) -> dict[str, float]:
    """The numbers among the metrics, by name; those of a group as group/name. Lists are left out."""
    flat: dict[str, float] = {}
    for name, value in result.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}/{inner}": number for inner, number in scalars(value).items()}
        elif isinstance(value, int | float) and not isinstance(value, bool):
            flat[name] = float(value)
    return flat


def points(result: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, float, int]]:
    """Name, value and step: the metrics of the run at step 0, and those after each task at its number."""
    for name, value in scalars(result).items():
        yield prefix + name, value, 0
    for task, accuracies in enumerate(result["after_each_task"]):
        for name, value in scalars(accuracies).items():
            yield f"after_each_task/{name}", value, task


class TensorBoard:
    """Event files in RUN/tensorboard: `tensorboard --logdir RUN/tensorboard`."""

    def __init__(self, folder: Path, config: RunConfig, epochs: Sequence[Epoch]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        place = folder / "tensorboard"
        # Events cannot be removed, so the files are written again from the history.
        for file in place.glob("events.out.tfevents.*"):
            file.unlink()
        self._writer = SummaryWriter(str(place))
        for epoch in epochs:
            self.epoch(epoch)

    def epoch(self, epoch: Epoch) -> None:
        self._writer.add_scalar(curve_of(epoch), epoch.loss, epoch.epoch)

    def measured(self, result: Mapping[str, Any]) -> None:
        for name, value, step in points(result, "metrics/"):
            self._writer.add_scalar(name, value, step)
        self._writer.close()


class MLflow:
    """One MLflow run, in RUN/mlflow/mlflow.db or on the server that MLFLOW_TRACKING_URI names."""

    def __init__(self, folder: Path, config: RunConfig, epochs: Sequence[Epoch]) -> None:
        # No telemetry unless the user enables it; mlflow reads this when it is imported.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow.tracking import MlflowClient

        logging.getLogger("mlflow").setLevel(logging.WARNING)  # it logs the creation of its tables
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
        """The MLflow run of an earlier session, if it still exists."""
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
        for name, value, step in points(result):
            self._client.log_metric(self._run, name, value, step=step)
        self._client.set_terminated(self._run)


class WandB:
    """One Weights & Biases run, offline in RUN/wandb unless WANDB_MODE has another value; `wandb sync` uploads it."""

    def __init__(self, folder: Path, config: RunConfig, epochs: Sequence[Epoch]) -> None:
        # No reports to its makers unless the user enables them; wandb reads this when it is imported.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        mode: Any = os.environ.get("WANDB_MODE") or "offline"
        if mode == "offline":
            # As with events, what was logged cannot be changed, so it is written again from the history.
            for older in (folder / "wandb").glob("offline-run-*"):
                shutil.rmtree(older)
        settings = wandb.Settings(silent=True, console="off", x_disable_stats=True, save_code=False, disable_git=True)
        about = {"preset": config.preset.name, "method": config.method, "seed": config.seed}
        self._run = wandb.init(
            project="openworld", name=folder.name, dir=folder, mode=mode, config=about, settings=settings
        )
        self._run.define_metric("epoch", hidden=True)
        self._run.define_metric("loss/*", step_metric="epoch")
        self._run.define_metric("task", hidden=True)
        self._run.define_metric("after_each_task/*", step_metric="task")
        for epoch in epochs:
            self.epoch(epoch)

    def epoch(self, epoch: Epoch) -> None:
        self._run.log({curve_of(epoch): epoch.loss, "epoch": epoch.epoch})

    def measured(self, result: Mapping[str, Any]) -> None:
        for name, value, step in points(result):
            if name.startswith("after_each_task/"):
                self._run.log({name: value, "task": step})
            else:
                self._run.summary[name] = value
        self._run.finish()


class TrackerKind(NamedTuple):
    """A tracker, and the packages that its extra of the same name installs."""

    make: Callable[[Path, RunConfig, Sequence[Epoch]], Tracker]
    packages: tuple[str, ...]


TRACKERS = {
    "tensorboard": TrackerKind(TensorBoard, ("tensorboard",)),
    "mlflow": TrackerKind(MLflow, ("mlflow", "alembic")),
    "wandb": TrackerKind(WandB, ("wandb",)),
}


def check_installed(names: Iterable[str]) -> None:
    """Raise a RunError that names the extra to install, if the packages of a tracker are missing."""
    for name in names:
        for package in TRACKERS[name].packages:
            if importlib.util.find_spec(package) is None:
                raise RunError(f"--log {name} needs the package {package}: pip install -e '.[{name}]'")


class Tracking:
    """The history of a run and its trackers. A tracker that fails is dropped, and training continues."""

    def __init__(self, folder: Path, config: RunConfig, names: Sequence[str] = ()) -> None:
        self._folder = folder
        self._config = config
        self._names = list(dict.fromkeys(names))
        self._history = History(folder)
        self._trackers: dict[str, Tracker] = {}

    def begin(self, progress: Progress, command: Sequence[str]) -> None:
        """Continue from the checkpoint, for this command."""
        self._history.rewind(progress)
        if progress.task < len(self._config.tasks):
            self._history.command(command)
        epochs = self._history.epochs
        for name in self._names:
            with self._dropped_if_it_fails(name):
                self._trackers[name] = TRACKERS[name].make(self._folder, self._config, epochs)

    def epoch(self, epoch: Epoch) -> None:
        self._history.epoch(epoch)
        self._each(lambda tracker: tracker.epoch(epoch))

    def measured(self, result: Mapping[str, Any]) -> None:
        self._each(lambda tracker: tracker.measured(result))

    def _each(self, do: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            with self._dropped_if_it_fails(name):
                do(tracker)

    @contextmanager
    def _dropped_if_it_fails(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a tracker's server, database or disk may raise anything
            self._trackers.pop(name, None)
            log.warning(
                f"--log {name} failed and is disabled for now ({type(error).__name__}: {error}); the history has "
                f"everything, and the next --resume --log {name} catches up"
            )
