"""Learn the tasks of a run, one after another, with a checkpoint after every epoch."""

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch

from models.detectors.detector import is_uneven
from models.network import Network
from training.config import RunConfig
from training.data.images import DataError
from training.data.sources import Sources
from training.data.tasks import TaskData, task_data
from training.host.device import one_line_compile_errors
from training.host.distributed import broadcast_network, is_main
from training.host.seeds import seed_everything
from training.learn.buffer import Buffer, keep_some
from training.learn.correction import Correction, fit_corrections
from training.learn.decisions import Nats, added, changed_acceptance, changed_answers, choose, cross_entropies
from training.learn.features import learn_features
from training.learn.finite import check_finite
from training.learn.head import fit_calibration, fit_detectors, fit_head, fit_ranges
from training.learn.optimizers import make_optimizer
from training.measure.alternative_rules import learned_logits
from training.show.console import Reporter
from training.store.checkpoint import CURRENT, Checkpoint, Progress, RunError, load, save, writing
from training.store.history import HISTORY, Epoch
from training.store.tracking import Tracking


@dataclass
class Learner:
    """The network of a run that is being learned; its whole state is in the checkpoint of the run."""

    folder: Path
    config: RunConfig
    device: torch.device
    reporter: Reporter
    tracking: Tracking
    compiling: bool = False

    def __post_init__(self) -> None:
        seed_everything(self.config.seed, "network")
        self.network = Network(self.config.preset.network)
        self.progress = Progress()
        self.buffer: Buffer | None = None
        self.checkpoint: Checkpoint | None = None
        self._started = time.monotonic()

    def restore(self) -> None:
        self.checkpoint = load(self.folder)
        self.checkpoint.load_network(self.network, [len(labels) for labels in self.config.tasks])
        self.progress = self.checkpoint.progress
        self.buffer = self.checkpoint.buffer()

    def learn(self, sources: Sources) -> None:
        """Learn every task that is not learned yet."""
        self.network.to(self.device)
        for task in range(self.progress.task, len(self.config.tasks)):
            data = task_data(sources.of(self.config.lesson_of(task)), self.config, task, self.device)
            self._expect_images(task, data.digest())
            self._report_uneven_classes(task, data)
            if len(self.network.heads) == task:
                seed_everything(self.config.seed, task, "room")
                self.network.add_task(data.classes)
            broadcast_network(self.network)
            if self.progress.phase == "features":
                self._learn_features(task, data)
            self._learn_head(task, data, sources)

    def _expect_images(self, task: int, digest: str) -> None:
        """Images added to a folder since may have moved training images to the validation side, so that is refused."""
        if self.progress.images not in ("", digest):
            raise RunError(
                f"{self.folder}: task {task} is half learned, and its images have changed since; allowed: --resume "
                "with the images as they were, or a new run in another --out"
            )
        self.progress = replace(self.progress, images=digest)

    def _learn_features(self, task: int, data: TaskData) -> None:
        how, views = self.config.preset.features, self.config.preset.augmentation
        optimizer = make_optimizer(how.optimizer, self.network.trainable(task), how.lr)
        epochs = self._epochs_left(how.epochs, optimizer)
        losses = learn_features(self.network, task, data, how, views, optimizer, epochs, compiling=self.compiling)
        with one_line_compile_errors():
            self._run(task, data, epochs, losses, optimizer)
        self.network.finish(task)
        self._save(replace(self.progress, phase="head", epoch=0))

    def _learn_head(self, task: int, data: TaskData, sources: Sources) -> None:
        preset = self.config.preset
        # The features are frozen from here on, even if a resumed run has no epoch of the head left to train.
        self.network.eval()
        if self.config.loss == "csi":
            parameters = list(self.network.head(task).parameters())
            optimizer = make_optimizer(preset.head.optimizer, parameters, preset.head.lr)
            epochs = self._epochs_left(preset.head.epochs, optimizer)
            losses = fit_head(self.network, task, data, preset.head, preset.augmentation, optimizer, epochs)
            self._run(task, data, epochs, losses, optimizer)
        self.reporter.print(f"{_title(task, data)}: fitting its detectors to {len(data.train)} images")
        fit_calibration(self.network, task, data.validation)
        seed_everything(self.config.seed, task, "detectors")
        copies = fit_detectors(self.network, task, data, preset.augmentation, preset.alpha)
        self.reporter.print(
            f"{_title(task, data)}: fitted to copies changed with strength {copies.strength:g}; of slightly changed "
            f"validation images, {100 * copies.unknown:.0f} % are called unknown"
        )
        fit_ranges(self.network, task, data.train)
        self._report_few_images(task, data)
        nats = added(self.progress.nats, cross_entropies(self.network, data.validation, preset.alpha))
        decision = self._decision(task, nats, sources)
        progress = replace(
            self.progress, task=task + 1, phase="features", epoch=0, images="", nats=nats, decision=decision
        )
        if self.config.buffer:
            progress = replace(progress, corrections=(*progress.corrections, self._correct(task, data)))
        self._save(progress)

    def _decision(self, task: int, nats: Nats, sources: Sources) -> str | None:
        """The decision after a task: chosen when the tasks of a lesson are learned, and kept in between."""
        before = self.progress.decision
        if task + 1 not in accumulate(len(lesson.tasks) for lesson in self.config.lessons):
            return before
        # With a single task nothing was measured: telling tasks apart takes two.
        found = choose(nats, before, task + 1) if task else choose({})
        if before is not None and before != found:
            self.reporter.print(
                f"the decision is {found} and no longer {before}: cross-entropy on validation images "
                f"{nats.get(before, math.inf):.1f} -> {nats[found]:.1f} nats; {self._changes(before, found, sources)}"
            )
        return found

    def _changes(self, before: str, after: str, sources: Sources) -> str:
        """Describes what another decision changes, for held-back images that are still available and for images of
        which only measurements are stored."""
        config, alpha, images = self.config, self.config.preset.alpha, []
        for task in range(len(self.network.heads)):
            # Images of earlier tasks may be gone: learning another task does not need them.
            with contextlib.suppress(DataError):
                source = sources.of(config.lesson_of(task))
                images.append(task_data(source, config, task, self.device).validation)
        classes, known, found = changed_answers(self.network, before, after, alpha, images)
        changed, total = changed_acceptance(self.network, before, after, alpha)
        return (
            f"of {found} validation images of {len(images)} of {len(self.network.heads)} tasks, {classes} get another "
            f"class and {known} change between known and unknown; of {total} images in memory, {changed} are accepted "
            "by their own task with one of the two only"
        )

    def _report_uneven_classes(self, task: int, data: TaskData) -> None:
        counts = data.train.class_counts()
        if is_uneven(counts):
            few, many = counts.index(min(counts)), counts.index(max(counts))
            self.reporter.print(
                f"{_title(task, data)}: its classes are uneven: {counts[few]} training images of {data.labels[few]}, "
                f"{counts[many]} of {data.labels[many]}. Each class is drawn equally often and standardised by its own "
                "images; more images of the small classes would help"
            )

    def _report_few_images(self, task: int, data: TaskData) -> None:
        images, alpha = self.network.detector(task).images, self.config.preset.alpha
        if 1 / (images + 1) >= alpha:
            self.reporter.print(
                f"{_title(task, data)}: {images} images are too few to call an image unknown at alpha {alpha}; "
                f"allowed: at least {math.ceil(1 / alpha)}. With this task, every image is called known"
            )

    def _correct(self, task: int, data: TaskData) -> tuple[Correction, ...]:
        """Store some images of the task and fit the scale and shift of every task on all stored ones (+c)."""
        config = self.config
        self.buffer = keep_some(self.buffer, task, data.train, data.classes, config.buffer, config.seed)
        pixels = np.ascontiguousarray(self.buffer.pixels.permute(0, 2, 3, 1).numpy())
        logits = learned_logits(self.network, pixels, self.device)["logits"]
        task_of_class = np.repeat(np.arange(task + 1), [len(labels) for labels in config.tasks[: task + 1]])
        return fit_corrections(logits, self.buffer.class_ids.numpy(), task_of_class)

    def _epochs_left(self, total: int, optimizer: torch.optim.Optimizer) -> range:
        """The epochs of a phase that are still to run; restores the state of the optimiser."""
        if self.progress.epoch and self.checkpoint is not None:
            self.checkpoint.load_optimizer(optimizer)
        self.checkpoint = None
        return range(self.progress.epoch, total)

    def _run(
        self, task: int, data: TaskData, epochs: range, losses: Iterator[float], optimizer: torch.optim.Optimizer
    ) -> None:
        """Run the epochs: each starts from its own seed and ends with a checkpoint."""
        phase = self.progress.phase
        with self.reporter.bar(f"{_title(task, data)}: {phase}", epochs.start, epochs.stop) as advance:
            for epoch in epochs:
                seed_everything(self.config.seed, task, phase, epoch)
                begun = time.monotonic()
                loss = next(losses)
                check_finite(f"task {task}, {phase}, epoch {epoch + 1}", loss, optimizer)
                if is_main():
                    seconds = round(time.monotonic() - begun, 3)
                    with writing(self.folder / HISTORY):
                        self.tracking.epoch(Epoch(task, phase, epoch + 1, loss, seconds))
                self._save(replace(self.progress, epoch=epoch + 1), optimizer)
                advance(loss)

    def _save(self, progress: Progress, optimizer: torch.optim.Optimizer | None = None) -> None:
        now = time.monotonic()
        self.progress = replace(progress, seconds=self.progress.seconds + now - self._started)
        self._started = now
        if is_main():
            with writing(self.folder / CURRENT):
                save(self.folder, self.network, optimizer, self.progress, self.buffer)


def _title(task: int, data: TaskData) -> str:
    """Such as "task 0 (cat, dog)"."""
    return f"task {task} ({', '.join(data.labels[:4])}{', ...' if data.classes > 4 else ''})"
