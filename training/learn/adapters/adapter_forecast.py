"""How long the adapters of a run will take, measured on a few photos and on a few steps of learning."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from models.network import Network
from training.config import Preset
from training.data.encoder import Encoder
from training.data.originals import Original
from training.data.views import augmented_view, turned_view
from training.learn.adapters.adapter_training import learn_features, learn_head
from training.learn.adapters.views import AUGMENTED, MOST_PER_CLASS, MOST_PER_TASK, AdapterData
from training.learn.optimizers import make_optimizer

CLASSES = 10
"""The number of classes of the task on which epochs are timed."""
STEPS, EPOCHS = 2, 3
"""Steps of each epoch that is measured, and how many epochs are."""


class AdapterForecast(NamedTuple):
    """What adapters add to a run."""

    views: int
    """Vectors of each photo, besides that of the photo as it is."""
    encoding: float
    """Seconds for the views that are not in the cache yet."""
    phases: dict[str, float]
    """How the name of each phase begins -> its seconds."""
    vectors: int
    """Vectors that are stored on disk."""

    @property
    def seconds(self) -> float:
        return sum(self.phases.values())


def forecast_adapters(
    encoder: Encoder,
    photos: Sequence[Original],
    taught: int,
    tasks: range,
    classes: int,
    each: float,
    preset: Preset,
    seed: int,
) -> AdapterForecast:
    """`photos` are all photos, of which about `taught` are learned from in the tasks with the numbers `tasks`; one is
    encoded in `each` seconds."""
    rotations, count_of_tasks = preset.network.rotations, max(len(tasks), 1)
    per_task = max(classes // count_of_tasks, 1)
    most = len(tasks) * min(MOST_PER_CLASS * per_task, MOST_PER_TASK)
    learned = min(taught, most)
    turned, augmented = turned_view(rotations), augmented_view(0, seed, rotations, preset.augmentation)
    seconds = {"turned": 0.0, "augmented": 0.0}
    for name, view, count in (("turned", turned, rotations - 1), ("augmented", augmented, AUGMENTED * rotations)):
        cached = len(photos) - encoder.missing(photos, view) if count else 0
        seconds[name] = each * count * max(learned - cached, 0)
    steps = learned / count_of_tasks
    features, head = (rate * steps for rate in seconds_per_photo(preset))
    phases = {}
    for task in tasks:
        for name, total in seconds.items():
            phases[f"views of task {task}, {name}"] = total / count_of_tasks
        phases[f"adapter of task {task}, features"] = features
        phases[f"adapter of task {task}, head"] = head
    views = rotations - 1 + AUGMENTED * rotations
    return AdapterForecast(views, sum(seconds.values()), phases, views * learned)


def seconds_per_photo(preset: Preset) -> tuple[float, float]:
    """How long both steps of learning take for one photo, with all their epochs: measured on random vectors."""
    how, config = preset.features, preset.network
    count = STEPS * how.batch_size
    vectors = torch.randn(count, 1 + AUGMENTED, config.rotations, config.channels)
    held_out = vectors[:1, 0].numpy()
    labels = tuple(map(str, range(CLASSES)))
    local = torch.arange(count) % CLASSES
    data = AdapterData(labels, vectors, local, local[:1].numpy(), held_out, local[:1].numpy())
    network = Network(config)
    network.add_task(CLASSES)
    optimizer = make_optimizer(how.optimizer, network.trainable(0), how.lr)
    features = _fastest(learn_features(network, 0, data, how, optimizer, range(EPOCHS)))
    network.finish(0)
    head = 0.0
    if how.loss == "csi":
        optimizer = make_optimizer(preset.head.optimizer, list(network.head(0).parameters()), preset.head.lr)
        head = _fastest(learn_head(network, 0, data, preset.head, optimizer, range(EPOCHS)))
    return features * how.epochs / count, head * preset.head.epochs / count


def _fastest(epochs: Iterator[float]) -> float:
    """Seconds of the fastest epoch: the first one allocates memory, and others may be disturbed."""
    seconds = []
    for _ in range(EPOCHS):
        started = time.perf_counter()
        next(epochs)
        seconds.append(time.perf_counter() - started)
    return min(seconds)
