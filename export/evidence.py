"""The validation images of a run that are still at hand, to judge approximations by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.network import Network
from training.classifier import task_said
from training.evaluate import Run
from training.images import DataError
from training.sources import Sources
from training.tasks import task_data

MOST_IMAGES = 2000
"""Twice as many as a cascade needs to be shown; every task sees each of them, in all its rotations."""
SAME = 0.02
"""Share of an image's largest logit by which its logits may differ from those that the task remembers of it.

A GPU that learned the task may have rounded to three digits (TF32); the logits of another image are elsewhere.
"""

CHANGED = "its images have changed since it was learned"


@dataclass(frozen=True)
class Evidence:
    """Images that learning held back, and the task of each; tasks whose images are gone are missing."""

    pixels: NDArray[np.uint8]
    tasks: NDArray[np.integer]
    missing: tuple[str, ...]
    left_out: int = 0
    """How many more there are at hand."""

    def __len__(self) -> int:
        return len(self.pixels)


def gather(run: Run, data: str | None = None) -> Evidence:
    """What is at hand of every task's validation images, but not too many; `data` says where images have moved."""
    sources, held_back, missing = Sources(run.config, data), {}, []
    for task in range(len(run.config.tasks)):
        try:
            held_back[task] = _held_back(run, sources, task)
        except DataError as error:
            missing.append(f"task {task}: {error}")
    found = sum(map(len, held_back.values()))
    for task, chosen in evenly({task: len(images) for task, images in held_back.items()}).items():
        if remembers(run.network, task, held_back[task], chosen):
            held_back[task] = held_back[task][chosen]
        else:
            found -= len(held_back.pop(task))
            missing.append(f"task {task}: {CHANGED}")
    pixels = [np.empty((0, *run.config.preset.image.shape), np.uint8)]
    pixels += [images.permute(0, 2, 3, 1).numpy() for images in held_back.values()]
    tasks = np.repeat(list(held_back), [len(images) for images in held_back.values()]).astype(int)
    return Evidence(np.ascontiguousarray(np.concatenate(pixels)), tasks, tuple(missing), found - len(tasks))


def evenly(counts: Mapping[int, int]) -> dict[int, NDArray[np.integer]]:
    """Which of its so many images each task gives: one in turn until there are enough, the same each time."""
    turns = sorted((turn, task) for task, count in counts.items() for turn in range(count))
    shares = Counter(task for _, task in turns[:MOST_IMAGES])
    return {
        task: np.sort(np.random.default_rng(task).permutation(count)[: shares[task]]) for task, count in counts.items()
    }


def _held_back(run: Run, sources: Sources, task: int) -> Tensor:
    """As many images as a task was validated by, uint8 [n, channels, height, width], or a DataError."""
    config = run.config
    source = sources.of(config.lesson_of(task))
    present = set(source.train.labels.tolist())
    if gone := [label for label in config.tasks[task] if label not in present]:
        raise DataError(f"no image of {', '.join(map(repr, gone))} is left")
    pixels = task_data(source, config, task, torch.device("cpu")).validation.pixels
    if len(pixels) != run.network.detector(task).memory.shape[1]:
        raise DataError(CHANGED)
    return pixels


def remembers(network: Network, task: int, pixels: Tensor, chosen: NDArray[np.integer]) -> bool:
    """Whether the chosen ones of these are images that the task was validated by.

    Which images of a folder are held back depends on how many there are: with one more, some that were trained on would
    pass for validation images. The task remembers what it said of the true ones.
    """
    remembered = network.detector(task).remembered()["logits"][chosen]
    difference = (task_said(network, task, pixels[chosen])["logits"] - remembered).abs().amax(dim=1)
    return bool((difference <= SAME * (1 + remembered.abs().amax(dim=1))).all())
