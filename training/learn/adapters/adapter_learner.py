"""Learn the adapter of each task, with checkpoints in between, and judge it on validation photos."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from models.network import Network
from training.config import RunConfig
from training.data.images import Images
from training.data.views import Encode
from training.host.seeds import seed_everything
from training.learn.adapters.adapter_training import learn_features, learn_head, settle_norms
from training.learn.adapters.baking import baked_adapter
from training.learn.adapters.choice import JudgedAdapters, judge
from training.learn.adapters.state import AdapterState, task_adapter
from training.learn.adapters.views import AdapterData, adapter_data
from training.learn.finite import check_finite
from training.learn.optimizers import make_optimizer
from training.show.console import Reporter
from training.store.checkpoint import Checkpoint, Progress, RunError, writing
from training.store.history import HISTORY, Epoch
from training.store.tracking import Tracking

CHECKPOINT_SECONDS = 20.0
"""An epoch takes less than a second, so a checkpoint is written only after this many seconds and at the end of a phase.
Every epoch has its own seed, so a resumed run repeats the epochs since then exactly."""

Save = Callable[[Progress, torch.optim.Optimizer | None], None]


@dataclass
class AdapterLearner:
    """The network of adapters that is being learned. Its weights are in the checkpoint of the run."""

    folder: Path
    config: RunConfig
    device: torch.device
    reporter: Reporter
    tracking: Tracking
    save: Save
    """Writes a checkpoint of the whole run with this progress."""

    def __post_init__(self) -> None:
        seed_everything(self.config.seed, "network")
        self.network = Network(self.config.preset.network)
        self.state = AdapterState()
        self._checkpoint: Checkpoint | None = None
        self._saved = time.monotonic()

    def restore(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        checkpoint.load_network(self.network, [len(labels) for labels in self.config.tasks])
        self.state = AdapterState.of(checkpoint)

    def learn(self, task: int, images: Images, own_validation: int, encode: Encode, progress: Progress) -> AdapterData:
        """Learn the adapter of a task from `progress` on; what it was learned from is returned, to judge it.

        The last `own_validation` images are the validation split of their source, if it has one.
        """
        self.network.to(self.device)
        data = adapter_data(images, own_validation, self.config, task, encode, self.device)
        digest = data.digest()
        if progress.images not in ("", digest):
            raise RunError(
                f"task {task} is half learned, and its images have changed since; allowed: --resume with the images as "
                "they were, or a new run in another --out"
            )
        progress = replace(progress, images=digest)
        if len(self.network.heads) == task:
            seed_everything(self.config.seed, task, "room")
            self.network.add_task(data.classes)
        if progress.phase == "features":
            progress = self._learn_features(task, data, progress)
        self.network.eval()
        if self.config.loss == "csi":
            self._learn_head(task, data, progress)
        return data

    def _learn_features(self, task: int, data: AdapterData, progress: Progress) -> Progress:
        how = self.config.preset.features
        optimizer = make_optimizer(how.optimizer, self.network.trainable(task), how.lr)
        epochs = self._epochs_left(how.epochs, progress, optimizer)
        losses = learn_features(self.network, task, data, how, optimizer, epochs)
        self._run(task, progress, epochs, losses, optimizer)
        self.network.finish(task)
        settle_norms(self.network, task, data)
        progress = replace(progress, phase="head", epoch=0)
        self.save(progress, None)
        return progress

    def _learn_head(self, task: int, data: AdapterData, progress: Progress) -> None:
        how = self.config.preset.head
        optimizer = make_optimizer(how.optimizer, list(self.network.head(task).parameters()), how.lr)
        epochs = self._epochs_left(how.epochs, progress, optimizer)
        losses = learn_head(self.network, task, data, how, optimizer, epochs)
        self._run(task, progress, epochs, losses, optimizer)

    def judge(self, task: int, data: AdapterData, pooled: NDArray[np.floating[Any]]) -> JudgedAdapters:
        """Judge the newest adapter, combined with statistics that have not seen its validation photos.

        `pooled` [m, all classes] are the logits of these statistics.
        """
        network, vectors = self.network, data.held_out_vectors
        rotations = network.config.rotations
        adapted: dict[int, list[NDArray[np.floating[Any]]]] = {}
        for count in dict.fromkeys((1, rotations)):
            earlier = [task_adapter(network, number, each, count) for number, each in enumerate(self.state.judged)]
            newest = baked_adapter(network, task)
            parts = [*earlier, newest if count > 1 else newest.upright()]
            adapted[count] = [adapter.logits(vectors[:, :count]) for adapter in parts]
        ends = np.cumsum([0, *(len(labels) for labels in self.config.tasks[: task + 1])]).tolist()
        columns = [slice(start, stop) for start, stop in pairwise(ends)]
        judged = judge(pooled, columns, adapted, data.held_out_classes)
        self.state = self.state.with_task(judged)
        return judged

    def _epochs_left(self, total: int, progress: Progress, optimizer: torch.optim.Optimizer) -> range:
        """The epochs of a phase that are still to run; restores the state of the optimiser."""
        if progress.epoch and self._checkpoint is not None:
            self._checkpoint.load_optimizer(optimizer)
        self._checkpoint = None
        return range(progress.epoch, total)

    def _run(
        self, task: int, progress: Progress, epochs: range, losses: Iterator[float], optimizer: torch.optim.Optimizer
    ) -> None:
        """Run the epochs, each from its own seed."""
        phase = progress.phase
        with self.reporter.bar(f"adapter of task {task}, {phase}", epochs.start, epochs.stop) as advance:
            for epoch in epochs:
                seed_everything(self.config.seed, task, phase, epoch)
                begun = time.monotonic()
                loss = next(losses)
                check_finite(f"adapter of task {task}, {phase}, epoch {epoch + 1}", loss, optimizer)
                with writing(self.folder / HISTORY):
                    seconds = round(time.monotonic() - begun, 3)
                    self.tracking.epoch(Epoch(task, phase, epoch + 1, loss, seconds))
                if time.monotonic() - self._saved >= CHECKPOINT_SECONDS:
                    self.save(replace(progress, epoch=epoch + 1), optimizer)
                    self._saved = time.monotonic()
                advance(loss)
