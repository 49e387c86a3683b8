"""Learn the tasks of a quick run: statistics of encoded vectors, one checkpoint per task, no gradient step."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from serving.bundle.pooled import Statistics
from training.config import POOLED, RunConfig
from training.data.images import Images, Source, join
from training.data.sources import Sources
from training.host.distributed import is_main
from training.host.seeds import seed_from
from training.learn.pooled_fit import fit_task, projection_for
from training.learn.pooled_state import PooledState
from training.show.console import Reporter
from training.store.checkpoint import CURRENT, Progress, load, save, writing


@dataclass
class PooledLearner:
    """The statistics of a run that is being learned; its whole state is in the checkpoint of the run."""

    folder: Path
    config: RunConfig
    reporter: Reporter
    progress: Progress = field(default_factory=Progress)

    def __post_init__(self) -> None:
        assert self.config.trunk is not None
        self.state = PooledState(Statistics(projection_for(self.config.trunk.dim)))
        self._started = time.monotonic()

    def restore(self) -> None:
        checkpoint = load(self.folder)
        self.state, self.progress = PooledState.of(checkpoint, self.config), checkpoint.progress

    def learn(self, sources: Sources) -> None:
        """Learn every task that is not learned yet."""
        if not is_main():
            return  # one process is enough: there is no gradient step to share
        for task in range(self.progress.task, len(self.config.tasks)):
            images = task_images(sources.of(self.config.lesson_of(task)), self.config, task)
            name = f"{title(self.config, task)}: statistics of {len(images)} photos"
            self.reporter.print(name)
            with self.reporter.phase(name):
                self._learn(task, images)
            self._report_few_images(task)

    def _learn(self, task: int, images: Images) -> None:
        first = sum(len(labels) for labels in self.config.tasks[:task])
        place = {label: first + number for number, label in enumerate(self.config.tasks[task])}
        class_ids = np.array([place[str(label)] for label in images.labels])
        seed = seed_from(self.config.seed, task, POOLED)
        self.state = self.state.with_task(*fit_task(self.state.statistics, images.pixels, class_ids, seed))
        now = time.monotonic()
        seconds, self._started = self.progress.seconds + now - self._started, now
        self.progress = replace(self.progress, task=task + 1, seconds=seconds, decision=POOLED)
        with writing(self.folder / CURRENT):
            save(self.folder, None, None, self.progress, pooled=self.state.to_arrays())

    def _report_few_images(self, task: int) -> None:
        rule, alpha = self.state.rules[task], self.config.preset.alpha
        if rule.least_p_value >= alpha:
            self.reporter.print(
                f"{title(self.config, task)}: {rule.images} photos are too few to call an image unknown at alpha "
                f"{alpha}; allowed: at least {math.ceil(1 / alpha)}. With this task, every image is called known"
            )


def task_images(source: Source, config: RunConfig, task: int) -> Images:
    """All images of a task to learn from: folds judge statistics, so no image is held out for validation."""
    labels = config.tasks[task]
    images = source.train.of(labels)
    return images if source.validation is None else join([images, source.validation.of(labels)])


def title(config: RunConfig, task: int) -> str:
    """Such as "task 0 (cat, dog)"."""
    labels = config.tasks[task]
    return f"task {task} ({', '.join(labels[:4])}{', ...' if len(labels) > 4 else ''})"
