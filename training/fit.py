"""Learn tasks one after another: `python -m training.fit`."""

from __future__ import annotations

import logging
import math
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from models.network import Network
from training.buffer import Buffer, keep_some
from training.calibration import Correction, fit_corrections
from training.checkpoint import (
    CURRENT,
    METRICS,
    Checkpoint,
    Progress,
    RunError,
    load,
    save,
    write_config,
    write_json,
    writing,
)
from training.classifier import fit_calibration, fit_detectors, fit_head, fit_ranges
from training.config import RunConfig, system_title
from training.decisions import added, choose, cross_entropies
from training.device import choose_device, describe, prepare, told_if_not_compiled
from training.evaluate import examine, measure, open_run
from training.history import HISTORY, Epoch
from training.images import DataError
from training.optimizers import make_optimizer
from training.plan import Plan, how_to_go_on, make_parser, make_plan
from training.prediction import learned_logits
from training.publish import PublishError, mark_learned, publish
from training.randomness import seed_everything
from training.report import Reporter, summary
from training.report_page import PAGE, write_page
from training.representation import learn_features
from training.sources import Sources
from training.tasks import TaskData, task_data
from training.together import after_the_first, first, joined, make_alike, wait
from training.tracking import Tracking, check_installed


class Learner:
    """A network on its way through the tasks of a run; everything it knows is in the run's checkpoint."""

    def __init__(
        self,
        folder: Path,
        config: RunConfig,
        device: torch.device,
        reporter: Reporter,
        tracking: Tracking,
        *,
        compiling: bool = False,
    ) -> None:
        self.folder = folder
        self.config = config
        self.device = device
        self.reporter = reporter
        self.tracking = tracking
        self.compiling = compiling
        seed_everything(config.seed, "network")
        self.network = Network(config.preset.network)
        self.progress = Progress()
        self.buffer: Buffer | None = None
        self.checkpoint: Checkpoint | None = None
        self._started = time.monotonic()

    def restore(self) -> None:
        """Go on from the run's last checkpoint."""
        self.checkpoint = load(self.folder)
        self.checkpoint.load_network(self.network, [len(labels) for labels in self.config.tasks])
        self.progress = self.checkpoint.progress
        self.buffer = self.checkpoint.buffer()

    def learn(self, sources: Sources) -> None:
        """Every task that is not learned yet."""
        self.network.to(self.device)
        for task in range(self.progress.task, len(self.config.tasks)):
            data = task_data(sources.of(self.config.lesson_of(task)), self.config, task, self.device)
            self._expect_images(task, data.digest())
            if len(self.network.heads) == task:
                seed_everything(self.config.seed, task, "room")
                self.network.add_task(data.classes)
            make_alike(self.network)
            if self.progress.phase == "features":
                self._learn_features(task, data)
            self._learn_head(task, data)

    def _expect_images(self, task: int, digest: str) -> None:
        """What joined a folder meanwhile may have moved images that were learned from to those that judge them."""
        if self.progress.images not in ("", digest):
            raise RunError(
                f"{self.folder}: task {task} is half learned, and its images have changed since; allowed: --resume "
                "with the images as they were, or a new run in another --out"
            )
        self.progress = replace(self.progress, images=digest)

    def _learn_features(self, task: int, data: TaskData) -> None:
        preset = self.config.preset
        optimizer = make_optimizer(preset.features.optimizer, self.network.trainable(task), preset.features.lr)
        epochs = self._epochs_left(preset.features.epochs, optimizer)
        losses = learn_features(
            self.network,
            task,
            data,
            preset.features,
            preset.augmentation,
            optimizer,
            epochs,
            compiling=self.compiling,
        )
        with told_if_not_compiled():
            self._run(task, data, epochs, losses, optimizer)
        self.network.finish(task)
        self._save(replace(self.progress, phase="head", epoch=0))

    def _learn_head(self, task: int, data: TaskData) -> None:
        preset = self.config.preset
        # The features are frozen from here on, also where a resumed run has no epoch of the head left to train.
        self.network.eval()
        if self.config.loss == "csi":
            parameters = list(self.network.head(task).parameters())
            optimizer = make_optimizer(preset.head.optimizer, parameters, preset.head.lr)
            epochs = self._epochs_left(preset.head.epochs, optimizer)
            losses = fit_head(self.network, task, data, preset.head, preset.augmentation, optimizer, epochs)
            self._run(task, data, epochs, losses, optimizer)
        self.reporter.say(f"{_title(task, data)}: fitting its detectors to {len(data.train)} images")
        fit_calibration(self.network, task, data.validation)
        seed_everything(self.config.seed, task, "detectors")
        fit_detectors(self.network, task, data)
        fit_ranges(self.network, task, data.train)
        nats = added(self.progress.nats, cross_entropies(self.network, data.validation, preset.alpha))
        decision = self.progress.decision
        if task + 1 == len(self.config.lessons[0].tasks):
            # How well tasks are told apart cannot be seen while there is one: then nothing was measured.
            decision = choose(nats if task else {})
        progress = replace(
            self.progress, task=task + 1, phase="features", epoch=0, images="", nats=nats, decision=decision
        )
        if self.config.buffer:
            progress = replace(progress, corrections=(*progress.corrections, self._correct(task, data)))
        self._save(progress)

    def _correct(self, task: int, data: TaskData) -> tuple[Correction, ...]:
        """Keep some images of the task and fit every task's scale and shift on all that are kept (the paper's +c)."""
        config = self.config
        self.buffer = keep_some(self.buffer, task, data.train, data.classes, config.buffer, config.seed)
        pixels = np.ascontiguousarray(self.buffer.pixels.permute(0, 2, 3, 1).numpy())
        logits = learned_logits(self.network, pixels, self.device)["logits"]
        task_of_class = np.repeat(np.arange(task + 1), [len(labels) for labels in config.tasks[: task + 1]])
        return fit_corrections(logits, self.buffer.class_ids.numpy(), task_of_class)

    def _epochs_left(self, total: int, optimizer: torch.optim.Optimizer) -> range:
        """The epochs of a phase that are still to run, with the optimiser where it was."""
        if self.progress.epoch and self.checkpoint is not None:
            self.checkpoint.load_optimizer(optimizer)
        self.checkpoint = None
        return range(self.progress.epoch, total)

    def _run(
        self, task: int, data: TaskData, epochs: range, losses: Iterator[float], optimizer: torch.optim.Optimizer
    ) -> None:
        """Ask for one loss after another: each epoch starts from its own seed and ends in a checkpoint."""
        phase = self.progress.phase
        with self.reporter.bar(f"{_title(task, data)}: {phase}", epochs.start, epochs.stop) as bar:
            for epoch in epochs:
                seed_everything(self.config.seed, task, phase, epoch)
                begun = time.monotonic()
                loss = next(losses)
                _check_finite(f"task {task}, {phase}, epoch {epoch + 1}", loss, optimizer)
                if first():
                    seconds = round(time.monotonic() - begun, 3)
                    with writing(self.folder / HISTORY):
                        self.tracking.epoch(Epoch(task, phase, epoch + 1, loss, seconds))
                self._save(replace(self.progress, epoch=epoch + 1), optimizer)
                bar.advance(loss)

    def _save(self, progress: Progress, optimizer: torch.optim.Optimizer | None = None) -> None:
        now = time.monotonic()
        self.progress = replace(progress, seconds=self.progress.seconds + now - self._started)
        self._started = now
        if first():
            with writing(self.folder / CURRENT):
                save(self.folder, self.network, optimizer, self.progress, self.buffer)


def _title(task: int, data: TaskData) -> str:
    """A task as a person knows it."""
    return f"task {task} ({', '.join(data.labels[:4])}{', ...' if data.classes > 4 else ''})"


def _check_finite(where: str, loss: float, optimizer: torch.optim.Optimizer) -> None:
    """Numbers that are none spread to all that is learned after them: no checkpoint may hold them."""
    weights = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not math.isfinite(loss):
        got = f"the loss is {loss}"
    elif not all(bool(weight.isfinite().all()) for weight in weights):
        got = "the last step left weights that are no numbers"
    else:
        return
    raise RunError(
        f"{where}: {got}; allowed: finite numbers. The checkpoint before it is kept, but --resume would come to the "
        "same end: begin anew in another --out, with another --seed or a smaller learning rate (training/presets.py)"
    )


def fit(
    plan: Plan, reporter: Reporter, command: Sequence[str], trackers: Sequence[str], *, compiling: bool = False
) -> None:
    """Learn, measure, write RUN/metrics.json and RUN/report.html, and show the metrics."""
    folder, config = plan.folder, plan.config
    check_installed(trackers)
    device = choose_device()
    prepare(device)
    kept = f", {config.buffer} images kept" if config.buffer else ""
    system = system_title(config.method, config.loss)
    how = ", step 1 compiled" if compiling else ""
    reporter.say(f"{config.preset.name}, {system}{kept}, seed {config.seed}, {describe(device)}{how}")
    # The others must have read what is there before the first process changes it.
    wait()
    tracking = Tracking(folder, config, trackers)
    learner = Learner(folder, config, device, reporter, tracking, compiling=compiling)
    if plan.begun:
        learner.restore()
    if first():
        try:
            _write_down(plan)
            tracking.begin(learner.progress, command)
        except OSError as error:
            raise RunError(f"{folder}: no run can be written there ({error.strerror}); choose another --out") from error
    learner.learn(plan.sources)
    if not first():
        return
    tested = examine(open_run(folder, device), plan.sources, device)
    result = measure(tested)
    with writing(folder / METRICS):
        write_json(folder / METRICS, result)
    tracking.measured(result)
    summary(result)
    with writing(folder / PAGE):
        write_page(folder, tested, result)


def _write_down(plan: Plan) -> None:
    """What shall be learned, where that is new."""
    if plan.grown:
        plan.folder.mkdir(parents=True, exist_ok=True)
        # Metrics are those of all tasks, or there are none: a run that has more to learn is not finished.
        for name in (METRICS, PAGE):
            (plan.folder / name).unlink(missing_ok=True)
        write_config(plan.folder, plan.config)


def finish(plan: Plan, shelf: Path | None, reporter: Reporter) -> None:
    """Publish what was learned, if asked to, and say what comes next."""
    folder = plan.folder
    if not first():
        return
    if shelf is not None:
        version = publish(folder, shelf, plan.quarantine)
        if plan.quarantine is not None:
            count = mark_learned(plan.config, plan.quarantine, version)
            reporter.say(f"{count} images of the quarantine are marked as learned in version {version}")
    elif plan.quarantine is not None:
        reporter.say(f"run: {folder}    next: the same command with --publish SHELF, which learns nothing again")
    else:
        command = shlex.join(["python", "-m", "export", str(folder), "--out", str(folder / "bundle")])
        reporter.say(f"run: {folder}    next: {command}")


def main(arguments: list[str] | None = None) -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    chosen = make_parser(__doc__).parse_args(arguments)
    reporter = Reporter()
    plan = None
    try:
        with joined():
            if not first():
                reporter.console.quiet = True
                logging.getLogger().setLevel(logging.ERROR)
            plan = after_the_first(lambda: make_plan(chosen))
            words = sys.argv[1:] if arguments is None else arguments
            command = ["python", "-m", "training.fit", *words]
            fit(plan, reporter, command, chosen.log, compiling=chosen.compile)
            finish(plan, chosen.publish, reporter)
    except PublishError as error:
        # The exporter has said why.
        return error.code
    except (RunError, DataError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\nstopped; {how_to_go_on(plan, chosen)}", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
