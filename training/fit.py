"""Learn tasks one after another: `python -m training.fit`."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from models.network import Network
from serving.decision import Rule
from training.checkpoint import (
    Checkpoint,
    Progress,
    RunError,
    load,
    read_config,
    save,
    started,
    write_config,
    write_json,
)
from training.classifier import fit_calibration, fit_distances, fit_head, fit_task_rule
from training.config import METHODS, PRESETS, RunConfig, choose_preset
from training.datasets import DataError, Source, load_source
from training.device import choose_device, describe, prepare
from training.evaluate import measure, open_run
from training.optimizers import make_optimizer
from training.randomness import seed_everything
from training.report import Reporter, summary
from training.representation import learn_features
from training.tasks import TaskData, check_classes, in_tasks_of, parse_tasks, task_data

SCORE = Rule.model_fields["score"].default


class Learner:
    """A network on its way through the tasks of a run; everything it knows is in the run's checkpoint."""

    def __init__(self, folder: Path, config: RunConfig, device: torch.device, reporter: Reporter) -> None:
        self.folder = folder
        self.config = config
        self.device = device
        self.reporter = reporter
        seed_everything(config.seed, "network")
        self.network = Network(config.preset.network)
        self.progress = Progress()
        self.checkpoint: Checkpoint | None = None
        self._started = time.monotonic()

    def restore(self) -> None:
        """Go on from the run's last checkpoint."""
        self.checkpoint = load(self.folder)
        self.checkpoint.load_network(self.network, [len(labels) for labels in self.config.tasks])
        self.progress = self.checkpoint.progress

    def learn(self, source: Source) -> None:
        """Every task that is not learned yet."""
        self.network.to(self.device)
        for task in range(self.progress.task, len(self.config.tasks)):
            data = task_data(source, self.config, task, self.device)
            if len(self.network.heads) == task:
                seed_everything(self.config.seed, task, "room")
                self.network.add_task(data.classes)
            if self.progress.phase == "features":
                self._learn_features(task, data)
            self._learn_head(task, data)

    def _learn_features(self, task: int, data: TaskData) -> None:
        preset = self.config.preset
        optimizer = make_optimizer(preset.features.optimizer, self.network.trainable(task), preset.features.lr)
        epochs = self._epochs_left(preset.features.epochs, optimizer)
        losses = learn_features(self.network, task, data, preset.features, preset.augmentation, optimizer, epochs)
        self._run(task, data, epochs, losses, optimizer)
        self.network.finish(task)
        self._save(replace(self.progress, phase="head", epoch=0))

    def _learn_head(self, task: int, data: TaskData) -> None:
        preset = self.config.preset
        # The features are frozen from here on, also where a resumed run has no epoch of the head left to train.
        self.network.eval()
        optimizer = make_optimizer("adam", list(self.network.head(task).parameters()), preset.head.lr)
        epochs = self._epochs_left(preset.head.epochs, optimizer)
        losses = fit_head(self.network, task, data, preset.head, preset.augmentation, optimizer, epochs)
        self._run(task, data, epochs, losses, optimizer)
        fit_distances(self.network, task, data.train)
        fit_calibration(self.network, task, data.validation)
        rule = fit_task_rule(self.network, task, data.validation, SCORE)
        self._save(replace(self.progress, task=task + 1, phase="features", epoch=0, rules=(*self.progress.rules, rule)))

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
        name = f"task {task} ({', '.join(data.labels[:4])}{', ...' if data.classes > 4 else ''}): {phase}"
        with self.reporter.bar(name, epochs.start, epochs.stop) as bar:
            for epoch in epochs:
                seed_everything(self.config.seed, task, phase, epoch)
                loss = next(losses)
                self._save(replace(self.progress, epoch=epoch + 1), optimizer)
                bar.advance(loss)

    def _save(self, progress: Progress, optimizer: torch.optim.Optimizer | None = None) -> None:
        now = time.monotonic()
        self.progress = replace(progress, seconds=self.progress.seconds + now - self._started)
        self._started = now
        save(self.folder, self.network, optimizer, self.progress)


def choose_run(chosen: argparse.Namespace) -> tuple[RunConfig, Source]:
    """The run that the command line asks for, with its images."""
    if chosen.resume:
        settled = ("preset", "method", "seed", "tasks", "classes_per_task")
        if given := [f"--{name.replace('_', '-')}" for name in settled if getattr(chosen, name) is not None]:
            raise RunError(f"--resume goes on as {chosen.out}/config.json says: leave out {', '.join(given)}")
        config = read_config(chosen.out)
        return config, load_source(config.preset.dataset, config.preset.image, chosen.data or config.data)
    name = chosen.preset or ("images" if chosen.data else "digits")
    preset = choose_preset(name, chosen.method or "hat")
    source = load_source(preset.dataset, preset.image, chosen.data)
    if chosen.tasks:
        tasks = parse_tasks(chosen.tasks)
    else:
        known = [label for label in source.classes if label not in preset.held_out]
        tasks = in_tasks_of(
            known, preset.classes_per_task if chosen.classes_per_task is None else chosen.classes_per_task
        )
    check_classes(tasks, source)
    return RunConfig(preset, chosen.seed or 0, tasks, chosen.data), source


def fit(chosen: argparse.Namespace) -> None:
    """Learn, measure, write RUN/metrics.json and show it."""
    reporter = Reporter()
    if started(chosen.out) and not chosen.resume:
        raise RunError(f"{chosen.out} holds a run already: go on with --resume, or choose another --out")
    config, source = choose_run(chosen)
    device = choose_device()
    prepare(device)
    reporter.say(f"{config.preset.name}, {config.method.upper()}+CSI, seed {config.seed}, {describe(device)}")
    chosen.out.mkdir(parents=True, exist_ok=True)
    learner = Learner(chosen.out, config, device, reporter)
    if chosen.resume and started(chosen.out):
        learner.restore()
    else:
        write_config(chosen.out, config)
    learner.learn(source)
    result = measure(open_run(chosen.out, device), source, device)
    write_json(chosen.out / "metrics.json", result)
    summary(result)
    reporter.say(f"run: {chosen.out}    next: python -m export {chosen.out} --out {chosen.out / 'bundle'}")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m training.fit", description=__doc__)
    parser.add_argument("--preset", choices=sorted(PRESETS), help="default: digits, or images with --data")
    parser.add_argument("--method", choices=METHODS, help="default: hat")
    parser.add_argument("--out", type=Path, default=Path("runs/digits"), metavar="RUN", help="default: %(default)s")
    parser.add_argument("--seed", type=int, help="default: 0")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out where it stopped")
    parser.add_argument("--data", metavar="FOLDER", help="class folders of images, or where a data set lies")
    parser.add_argument("--tasks", metavar='"cat,dog; ship,truck"', help="which classes make which task")
    parser.add_argument("--classes-per-task", type=int, metavar="N", help="split the classes in order instead")
    return parser


def main(arguments: list[str] | None = None) -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        fit(make_parser().parse_args(arguments))
    except (RunError, DataError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped; go on with the same command and --resume", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
