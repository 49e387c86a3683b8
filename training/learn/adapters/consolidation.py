"""Learn one adapter for classes that were taught to a server, in addition to the adapters of its run.

The network of the run has a mask for each of its tasks (HAT), which protects what these use, and the taught classes are
its next task: features by CSI, then a head. The run itself stays as it is. Whether the adapter is better than the
statistics that the server learned in closed form is measured on validation photos that neither of them has seen.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from serving.bundle.pooled.adapters import Adapter
from training.config import Lesson, RunConfig
from training.data.images import Images
from training.data.quarantined import QUARANTINE
from training.data.views import Encode
from training.learn.adapters.adapter_learner import AdapterLearner
from training.learn.adapters.baking import baked_adapter
from training.learn.adapters.choice import Choice, choose, judge
from training.learn.adapters.state import task_adapter
from training.show.console import Reporter
from training.store.checkpoint import Checkpoint, Progress
from training.store.tracking import Tracking

Logits = Callable[[NDArray[np.int64], NDArray[np.float32]], NDArray[np.floating[Any]]]
"""Places of validation photos, and their vectors [m, rotations, dim] -> the logits [m, classes] of a model that has not
seen them; the last columns are the taught classes."""


@dataclass(frozen=True)
class ConsolidatedAdapter:
    """The adapter, and whether to use it: `choice.weight` is 0 if the taught form is at least as good."""

    adapter: Adapter
    choice: Choice
    held_out: NDArray[np.int64]
    """The validation photos, as places among all."""


def learn_consolidated(
    config: RunConfig,
    checkpoint: Checkpoint,
    images: Images,
    classes: Sequence[str],
    encode: Encode,
    taught: Logits,
    rotations: int,
    device: torch.device,
    reporter: Reporter,
) -> ConsolidatedAdapter:
    """Learn the adapter of `classes` from encoded images, and compare it with the taught form.

    `rotations` is the number that the served model reads; more would take longer for every image.
    """
    # The labels are only compared with those of the images here, and a run may have one of them under another name.
    names = {label: f"taught {number}" for number, label in enumerate(classes)}
    images = replace(images, labels=np.array([names[str(label)] for label in images.labels], dtype=np.str_))
    lesson = Lesson((tuple(names.values()),), QUARANTINE)
    earlier = () if config.quick else config.lessons
    extended = replace(config, lessons=(*earlier, lesson), quick=False)
    task = len(extended.tasks) - 1
    with tempfile.TemporaryDirectory(prefix="openworld-consolidate-") as folder:
        tracking = Tracking(Path(folder), extended, ())
        learner = AdapterLearner(Path(folder), extended, device, reporter, tracking, lambda progress, optimizer: None)
        if not config.quick:
            learner.restore(checkpoint)
        data = learner.learn(task, images, 0, encode, Progress(task=task))
    newest, vectors = baked_adapter(learner.network, task), data.held_out_vectors
    adapted = {
        count: [(newest if count > 1 else newest.upright()).logits(vectors[:, :count])]
        for count in dict.fromkeys((1, rotations))
    }
    pooled = taught(data.held_out, vectors)
    own = slice(pooled.shape[1] - len(classes), pooled.shape[1])
    judged = judge(pooled, [own], adapted, data.held_out_classes)
    choice = choose([judged], rotations)
    return ConsolidatedAdapter(
        task_adapter(learner.network, task, judged, choice.best.rotations), choice, data.held_out
    )
