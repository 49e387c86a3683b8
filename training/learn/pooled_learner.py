"""Learn the tasks of a run with a trunk: statistics of encoded vectors and, unless it is quick, one adapter each."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from models.masks.all_reduce import processes
from serving.bundle.pooled import PooledClassifier, Projection, Statistics, learn_task, projection_for
from serving.bundle.pooled.factors import MOST_KEPT, ClassFactors
from training.config import POOLED, RunConfig
from training.data.images import Images, Source, join
from training.data.sources import Sources
from training.host.distributed import is_main
from training.host.seeds import seed_from
from training.learn.adapters.adapter_learner import AdapterLearner
from training.learn.adapters.views import AdapterData
from training.learn.pooled_state import PooledState
from training.show.console import Reporter
from training.store.checkpoint import CURRENT, Progress, RunError, load, save, writing
from training.store.tracking import Tracking


@dataclass
class PooledLearner:
    """The statistics of a run that is being learned; its whole state is in the checkpoint of the run."""

    folder: Path
    config: RunConfig
    device: torch.device
    reporter: Reporter
    tracking: Tracking
    progress: Progress = field(default_factory=Progress)

    def __post_init__(self) -> None:
        assert self.config.trunk is not None
        self.state = _nothing_learned(projection_for(self.config.trunk.dim))
        self.adapters: AdapterLearner | None = None
        if not self.config.quick:
            if processes() > 1:
                raise RunError(
                    f"adapters on a trunk are learned by one process, got {processes()}; allowed: without torchrun, or "
                    "with --quick"
                )
            self.adapters = AdapterLearner(
                self.folder, self.config, self.device, self.reporter, self.tracking, self._save
            )
        self._started = time.monotonic()

    def restore(self) -> None:
        checkpoint = load(self.folder)
        self.state, self.progress = PooledState.of(checkpoint, self.config), checkpoint.progress
        if self.adapters is not None:
            self.adapters.restore(checkpoint)

    def learn(self, sources: Sources) -> None:
        """Learn every task that is not learned yet."""
        if not is_main():
            return  # one process is enough: there is no gradient step to share
        for task in range(self.progress.task, len(self.config.tasks)):
            source = sources.of(self.config.lesson_of(task))
            images = task_images(source, self.config, task)
            data = None
            if self.adapters is not None:
                held_out = 0 if source.validation is None else len(source.validation.of(self.config.tasks[task]))
                with self._timed_adapters():
                    data = self.adapters.learn(task, images, held_out, sources.views, self.progress)
            name = f"{title(self.config, task)}: statistics of {len(images)} photos"
            self.reporter.print(name)
            with self.reporter.phase(name):
                self._learn(task, images, data)
            self._report_few_images(task)

    def _learn(self, task: int, images: Images, data: AdapterData | None) -> None:
        first = sum(len(labels) for labels in self.config.tasks[:task])
        place = {label: first + number for number, label in enumerate(self.config.tasks[task])}
        class_ids = np.array([place[str(label)] for label in images.labels])
        seed = seed_from(self.config.seed, task, POOLED)
        if task == 0:
            per_class = len(images) / len(self.config.tasks[0])
            self.state = _nothing_learned(projection_for(self.state.statistics.projection.dim, per_class))
        state = self.state
        learned = learn_task(state.statistics, state.memory, images.pixels, class_ids, seed, state.earlier)
        self.state = state.with_task(learned, self._factors_with(task, images, class_ids))
        if self.adapters is not None and data is not None:
            with self._timed_adapters():
                # Statistics that have not seen the photos that judge the adapter.
                unseen, out = learned.statistics.copy(), data.held_out
                unseen.remove(images.at(out).pixels, class_ids[out])
                beside = PooledClassifier.fit(unseen, learned.classifier.settings)
                self.adapters.judge(task, data, beside.logits(images.at(out).pixels))
        self._save(replace(self.progress, task=task + 1, phase="features", epoch=0, images="", decision=POOLED))

    def _factors_with(self, task: int, images: Images, class_ids: NDArray[np.int64]) -> ClassFactors | None:
        """Those of the classes so far, unless they have become too large to be kept."""
        if self.state.factors is None:
            return None
        factors = self.state.factors.with_classes(images.pixels, class_ids)
        if factors.size <= MOST_KEPT:
            return factors
        self.reporter.print(
            f"{title(self.config, task)}: the parts of all classes take {factors.size / 1e6:.0f} MB, and at most "
            f"{MOST_KEPT / 1e6:.0f} MB are kept: no server can learn further classes from this run"
        )
        return None

    def _save(self, progress: Progress, optimizer: torch.optim.Optimizer | None = None) -> None:
        now = time.monotonic()
        seconds, self._started = self.progress.seconds + now - self._started, now
        self.progress = replace(progress, seconds=seconds, adapter_seconds=self.progress.adapter_seconds)
        arrays, network = self.state.to_arrays(), None
        if self.adapters is not None:
            network = self.adapters.network
            arrays |= self.adapters.state.to_arrays()
        with writing(self.folder / CURRENT):
            save(self.folder, network, optimizer, self.progress, pooled=arrays)

    @contextmanager
    def _timed_adapters(self) -> Iterator[None]:
        begun = time.monotonic()
        yield
        spent = self.progress.adapter_seconds + time.monotonic() - begun
        self.progress = replace(self.progress, adapter_seconds=spent)

    def _report_few_images(self, task: int) -> None:
        rule = self.state.decider(self.config.preset.alpha).rule
        if rule.blind_tasks():
            photos = sum(each.images for each in rule.tasks)
            self.reporter.print(
                f"{title(self.config, task)}: {photos} photos in all are too few to call an image unknown at alpha "
                f"{rule.alpha}; needed: {math.ceil(1 / rule.alpha)}. Until then, every image is called known"
            )


def _nothing_learned(projection: Projection) -> PooledState:
    return PooledState(Statistics(projection), factors=ClassFactors(projection))


def task_images(source: Source, config: RunConfig, task: int) -> Images:
    """All images of a task to learn from: folds judge statistics, so no image is held out for validation."""
    labels = config.tasks[task]
    images = source.train.of(labels)
    return images if source.validation is None else join([images, source.validation.of(labels)])


def title(config: RunConfig, task: int) -> str:
    """The name of a task in progress lines, such as "task 0 (cat, dog)"."""
    labels = config.tasks[task]
    return f"task {task} ({', '.join(labels[:4])}{', ...' if len(labels) > 4 else ''})"
