"""A process that runs two optimiser steps of step 1 per input line, and answers with its peak memory.

The first step has the gates as soft and the second as hard as an epoch's first and last: hard ones leave gradients with
numbers that a processor may be slow at. Each contestant has a process of its own because how a process treats these and
its memory (training.host.device.prepare) is settled for all of it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace

import torch

from models.config import NetworkConfig
from models.masks.hat import sharpness_at
from models.network import Network
from tests.benchmarks.authors_step import make_steps
from tests.benchmarks.export_memory import peak_megabytes
from tests.benchmarks.exported import resnet
from tests.helpers import open_gates
from training.config import Augmentation, FeatureLearning
from training.data.tasks import Batchable, TaskData
from training.host.device import choose_device, prepare
from training.learn.features import learn_features
from training.learn.optimizers import make_optimizer
from training.presets import PRESETS

THREADS = 2
BATCHES = 2
"""An epoch: HAT's sharpness runs from its least to its greatest over them."""
EPOCHS = 10**6
"""Enough steps that the learning rate hardly falls."""


def settings(network: str) -> tuple[NetworkConfig, Augmentation, FeatureLearning]:
    """`mnist`: the preset's. `resnet18`: width 32 on 32x32 colour images, learned as the preset for images is."""
    if network == "mnist":
        preset = PRESETS["mnist-5t-cpu"]
        return preset.network, preset.augmentation, preset.features
    return resnet("hat", 32), Augmentation(), PRESETS["images"].features


def our_steps(network: str, size: int, tasks: int) -> Callable[[], float]:
    """Steps of training.learn.features on `size` random images of two classes each, after `tasks` finished tasks."""
    config, views, how = settings(network)
    torch.manual_seed(0)
    learner = Network(config)
    for task in range(tasks):
        learner.add_task(2)
        open_gates(learner, task, 0.1)
        learner.finish(task)
    learner.add_task(2)
    pixels = torch.randint(256, (BATCHES * size, config.channels, config.height, config.width), dtype=torch.uint8)
    images = Batchable(pixels, torch.arange(BATCHES * size) % 2)
    optimizer = make_optimizer(how.optimizer, learner.trainable(tasks), how.lr)
    how = replace(how, batch_size=size, epochs=EPOCHS)
    data = TaskData(("first", "second"), images, images)
    losses = learn_features(learner, tasks, data, how, views, optimizer, range(EPOCHS))
    return lambda: next(losses)


def main(contestant: str, network: str, size: str, tasks: str) -> None:
    """`ours`, `authors`, or `authors, prepared`: the same in a process that was prepared as ours are."""
    torch.set_num_threads(THREADS)
    if contestant != "authors":
        prepare(choose_device())
    if contestant == "ours":
        steps = our_steps(network, int(size), int(tasks))
    else:
        config, views, how = settings(network)
        sharpness = [sharpness_at(batch / (BATCHES - 1), how.max_sharpness) for batch in range(BATCHES)]
        steps = make_steps(config, views, int(size), sharpness)
    for _ in sys.stdin:
        loss = steps()
        if not math.isfinite(loss):
            raise ArithmeticError(f"{contestant}, {network}: the loss is {loss}")
        print(peak_megabytes(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
