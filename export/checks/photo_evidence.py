"""Some photos of every task of a run with a trunk, as pixels and as the vectors that the run learned from."""

from __future__ import annotations

import numpy as np

from export.graph.evidence import Evidence, evenly
from models.trunks.trunk import Trunk
from training.data.images import DataError, Images, join
from training.data.opening import open_sources
from training.data.quarantined import Address
from training.data.reread import reread
from training.run import Run

MOST_PHOTOS = 200
"""Photos are decoded and encoded again, which takes some ten milliseconds each."""


def gather_photos(run: Run, trunk: Trunk, data: str | None = None, quarantine: Address | None = None) -> Evidence:
    """Photos of every task that are available, at most MOST_PHOTOS; `data` is where images have moved to.

    Statistics need no validation images, so these are training images: they show that a bundle computes what the run
    computed, and not how good it is.
    """
    sources, found, missing = open_sources(run.config, data, quarantine, trunk=trunk), {}, []
    for task, labels in enumerate(run.config.tasks):
        try:
            source = sources.of(run.config.lesson_of(task))
            images = source.train.of(labels)
            found[task] = images if source.validation is None else join([images, source.validation.of(labels)])
            if not len(found[task]):
                del found[task]
                raise DataError("no image is left")
        except DataError as error:
            missing.append(f"task {task}: {error}")
    spec = run.config.preset.image
    chosen = {task: found[task].at(index) for task, index in evenly(_counts(found), MOST_PHOTOS).items()}
    kept = {task: reread(images, spec) for task, images in chosen.items()}
    pixels = [np.empty((0, *spec.shape), np.uint8), *(each for each, _ in kept.values())]
    none = np.empty((0, *([run.rotations] if run.rotations > 1 else []), trunk.spec.dim), np.float32)
    # Imported here, because opening a run needs none of what measures it.
    from training.measure.evaluation import run_inputs

    encoded = [none, *(run_inputs(run, images, sources) for _, images in kept.values())]
    tasks = [task for task, (_, images) in kept.items() for _ in images.labels]
    place = {label: class_id for class_id, label in enumerate(run.config.labels)}
    class_ids = [place[str(label)] for _, images in kept.values() for label in images.labels]
    return Evidence(
        pixels=np.concatenate(pixels),
        tasks=np.array(tasks, int),
        class_ids=np.array(class_ids, int),
        missing=tuple(missing),
        left_out=sum(_counts(found).values()) - len(tasks),
        encoded=np.concatenate(encoded),
        kind="training",
    )


def _counts(found: dict[int, Images]) -> dict[int, int]:
    return {task: len(images) for task, images in found.items()}
