"""A process that learns one step of step 1 for every line it reads, and answers with the most memory it ever held.

Each contestant has a process of its own because how a process keeps its memory (training.device.prepare) is settled
for all of it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace

import torch

from models.network import Network, NetworkConfig
from tests.benchmarks.authors_step import make_step
from tests.benchmarks.export_memory import peak_megabytes
from tests.benchmarks.exported import resnet
from tests.helpers import open_gates
from training.augment import Augmentation
from training.config import FeatureLearning
from training.device import choose_device, prepare
from training.optimizers import make_optimizer
from training.presets import PRESETS
from training.representation import learn_features
from training.tasks import Batchable, TaskData

THREADS = 2
STEPS = 10**6


def settings(network: str) -> tuple[NetworkConfig, Augmentation, FeatureLearning]:
    """`mnist`: the preset's. `resnet18`: width 32 on 32x32 colour images, learned as the preset for images is."""
    if network == "mnist":
        preset = PRESETS["mnist-5t-cpu"]
        return preset.network, preset.augmentation, preset.features
    return resnet("hat", 32), Augmentation(), PRESETS["images"].features


def our_step(network: str, size: int, tasks: int) -> Callable[[], float]:
    """One step of training.representation on `size` random images of two classes, after `tasks` finished tasks."""
    config, views, how = settings(network)
    torch.manual_seed(0)
    learner = Network(config)
    for task in range(tasks):
        learner.add_task(2)
        open_gates(learner, task, 0.1)
        learner.finish(task)
    learner.add_task(2)
    pixels = torch.randint(256, (size, config.channels, config.height, config.width), dtype=torch.uint8)
    batch = Batchable(pixels, torch.arange(size) % 2)
    optimizer = make_optimizer(how.optimizer, learner.trainable(tasks), how.lr)
    # An epoch of one batch, so that each is one step, and so many that the learning rate hardly falls.
    how = replace(how, batch_size=size, epochs=STEPS)
    data = TaskData(("first", "second"), batch, batch)
    losses = learn_features(learner, tasks, data, how, views, optimizer, range(STEPS))
    return lambda: next(losses)


def main(contestant: str, network: str, size: str, tasks: str) -> None:
    """`ours`, `authors`, or `authors, memory kept`: the same with what our processes do about freed memory."""
    torch.set_num_threads(THREADS)
    if contestant != "authors":
        prepare(choose_device())
    if contestant == "ours":
        step = our_step(network, int(size), int(tasks))
    else:
        config, views, _ = settings(network)
        step = make_step(config, views, int(size))
    for _ in sys.stdin:
        loss = step()
        if not math.isfinite(loss):
            raise ArithmeticError(f"{contestant}, {network}: the loss is {loss}")
        print(peak_megabytes(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
