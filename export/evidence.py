"""The validation images of a run that are still at hand, to judge approximations by."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.network import Network
from training.classifier import task_said
from training.datasets import DataError
from training.evaluate import Run
from training.sources import Sources
from training.tasks import task_data

SAME = 0.02
"""Share of an image's largest logit by which its logits may differ from those that the task remembers of it.

A GPU that learned the task rounded otherwise, by a tenth of that; the logits of another image are elsewhere altogether.
"""


@dataclass(frozen=True)
class Evidence:
    """Images that learning held back, and the task of each; tasks whose images are gone are missing."""

    pixels: NDArray[np.uint8]
    tasks: NDArray[np.integer]
    missing: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.pixels)


def gather(run: Run, data: str | None = None) -> Evidence:
    """What is at hand of every task's validation images; `data` says where images are that have moved."""
    sources, pixels, tasks, missing = Sources(run.config, data), [], [], []
    for task in range(len(run.config.tasks)):
        try:
            held_back = _held_back(run, sources, task)
        except DataError as error:
            missing.append(f"task {task}: {error}")
            continue
        pixels.append(held_back.permute(0, 2, 3, 1).numpy())
        tasks.append(np.full(len(held_back), task))
    if not pixels:
        return Evidence(np.empty((0, *run.config.preset.image.shape), np.uint8), np.empty(0, int), tuple(missing))
    return Evidence(np.ascontiguousarray(np.concatenate(pixels)), np.concatenate(tasks), tuple(missing))


def _held_back(run: Run, sources: Sources, task: int) -> Tensor:
    """The images that a task was validated by, uint8 [n, channels, height, width], or a DataError if they are not."""
    config = run.config
    source = sources.of(config.lesson_of(task))
    present = set(source.train.labels.tolist())
    if gone := [label for label in config.tasks[task] if label not in present]:
        raise DataError(f"no image of {', '.join(map(repr, gone))} is left")
    pixels = task_data(source, config, task, torch.device("cpu")).validation.pixels
    if not remembers(run.network, task, pixels):
        raise DataError("its images have changed since it was learned")
    return pixels


def remembers(network: Network, task: int, pixels: Tensor) -> bool:
    """Whether these are the images that the task was validated by.

    Which images of a folder are held back depends on how many there are: with one more, some that were trained on would
    pass for validation images. The task remembers what it said of the true ones.
    """
    remembered = network.detector(task).remembered()["logits"]
    if len(pixels) != len(remembered):
        return False
    difference = (task_said(network, task, pixels)["logits"] - remembered).abs().amax(dim=1)
    return bool((difference <= SAME * (1 + remembered.abs().amax(dim=1))).all())
