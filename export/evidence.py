"""The validation images of a run that are still at hand, to judge approximations by."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from training.config import RunConfig
from training.datasets import DataError
from training.sources import Sources
from training.tasks import task_data


@dataclass(frozen=True)
class Evidence:
    """Images that learning held back, and the task of each; tasks whose images are gone are missing."""

    pixels: NDArray[np.uint8]
    tasks: NDArray[np.integer]
    missing: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.pixels)


def gather(config: RunConfig, data: str | None = None) -> Evidence:
    """What is at hand of every task's validation images; `data` says where images are that have moved."""
    sources, pixels, tasks, missing = Sources(config, data), [], [], []
    for task in range(len(config.tasks)):
        try:
            held_back = task_data(sources.of(config.lesson_of(task)), config, task, torch.device("cpu")).validation
        except DataError as error:
            missing.append(f"task {task}: {error}")
            continue
        pixels.append(held_back.pixels.permute(0, 2, 3, 1).numpy())
        tasks.append(np.full(len(held_back), task))
    if not pixels:
        return Evidence(np.empty((0, *config.preset.image.shape), np.uint8), np.empty(0, int), tuple(missing))
    return Evidence(np.ascontiguousarray(np.concatenate(pixels)), np.concatenate(tasks), tuple(missing))
