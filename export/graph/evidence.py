"""The validation images of a run that are still available, by which approximations are judged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.network import Network
from training.data.images import DataError
from training.data.quarantined import Address
from training.data.sources import Sources
from training.data.tasks import Batchable, task_data
from training.learn.measurements import task_measurements
from training.run import Run

MOST_IMAGES = 2000
"""Twice as many as the choice of a cascade needs; every task evaluates each of them in all rotations."""
SAME = 0.02
"""Share of an image's largest logit by which its logits may differ from those in the task's memory.

A GPU that learned the task may have rounded to three digits (TF32); the logits of another image differ by more.
"""

CHANGED = "its images have changed since it was learned"


@dataclass(frozen=True)
class Evidence:
    """Images of a run, with task and class of each. `missing` names the tasks whose images are gone, and why."""

    pixels: NDArray[np.uint8]
    tasks: NDArray[np.integer]
    class_ids: NDArray[np.integer]
    missing: tuple[str, ...]
    left_out: int = 0
    """The number of available images beyond MOST_IMAGES."""
    encoded: NDArray[np.float32] | None = None
    """With a trunk: the vectors that the run learned from, [n, dim]."""
    kind: str = "validation"
    """What the images were to the run: "validation", or "training" for statistics, which need no validation images."""

    def __len__(self) -> int:
        return len(self.pixels)

    def at(self, chosen: NDArray[np.bool_]) -> Evidence:
        """Some of the images."""
        encoded = None if self.encoded is None else self.encoded[chosen]
        return replace(
            self,
            pixels=self.pixels[chosen],
            tasks=self.tasks[chosen],
            class_ids=self.class_ids[chosen],
            encoded=encoded,
        )


def gather(run: Run, data: str | None = None, quarantine: Address | None = None) -> Evidence:
    """Every task's validation images that are available, at most MOST_IMAGES; `data` is where images have moved to."""
    sources, held_back, missing = Sources(run.config, data, quarantine), {}, []
    for task in range(len(run.config.tasks)):
        try:
            held_back[task] = _held_back(run, sources, task)
        except DataError as error:
            missing.append(f"task {task}: {error}")
    found = sum(map(len, held_back.values()))
    pixels = [np.empty((0, *run.config.preset.image.shape), np.uint8)]
    tasks, class_ids = [], [np.empty(0, int)]
    for task, chosen in evenly({task: len(images) for task, images in held_back.items()}).items():
        images = held_back[task]
        if remembers(run.need_network("evidence"), task, images.pixels, chosen):
            pixels.append(images.pixels[chosen].permute(0, 2, 3, 1).numpy())
            tasks += [task] * len(chosen)
            class_ids.append(run.rule.columns[task].start + images.local_classes[chosen].numpy())
        else:
            found -= len(images)
            missing.append(f"task {task}: {CHANGED}")
    return Evidence(
        np.ascontiguousarray(np.concatenate(pixels)),
        np.array(tasks, int),
        np.concatenate(class_ids),
        tuple(missing),
        found - len(tasks),
    )


def evenly(counts: Mapping[int, int], most: int | None = None) -> dict[int, NDArray[np.integer]]:
    """Indices of the images taken from each task: one per task in turn until there are enough, the same each time."""
    turns = sorted((turn, task) for task, count in counts.items() for turn in range(count))
    shares = Counter(task for _, task in turns[: MOST_IMAGES if most is None else most])
    return {
        task: np.sort(np.random.default_rng(task).permutation(count)[: shares[task]]) for task, count in counts.items()
    }


def _held_back(run: Run, sources: Sources, task: int) -> Batchable:
    """The task's validation images; a DataError if their number has changed."""
    config = run.config
    source = sources.of(config.lesson_of(task))
    present = set(source.train.labels.tolist())
    if gone := [label for label in config.tasks[task] if label not in present]:
        raise DataError(f"no image of {', '.join(map(repr, gone))} is left")
    images = task_data(source, config, task, torch.device("cpu")).validation
    if len(images) != len(run.need_network("evidence").detector(task).own.means()["logits"]):
        raise DataError(CHANGED)
    return images


def remembers(network: Network, task: int, pixels: Tensor, chosen: NDArray[np.integer]) -> bool:
    """Whether the chosen images are among those that the task was validated with, by the logits in its memory.

    Which images of a folder are held back for validation depends on how many there are. With one more, some training
    images would pass for validation images.
    """
    remembered = network.detector(task).own.means()["logits"][chosen]
    difference = (task_measurements(network, task, pixels[chosen])["logits"] - remembered).abs().amax(dim=1)
    return bool((difference <= SAME * (1 + remembered.abs().amax(dim=1))).all())
