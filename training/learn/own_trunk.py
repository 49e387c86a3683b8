"""A trunk that is learned from the images of the run itself, without their labels: `--trunk patches`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from models.trunks.patches import SIZE, as_trunk, learn_patches, patch_options
from models.trunks.trunk import Trunk, TrunkRequest
from serving.bundle.sections import ImageSpec
from training.data.datasets import load_source
from training.data.images import DataError, Source, join
from training.data.lister import Lister
from training.data.reread import reread
from training.host.seeds import seed_from
from training.show.console import Reporter

MOST_IMAGES, MOST_BYTES = 4000, 200_000_000
"""Images that filters are learned from, and their pixels in memory."""


def learn_trunk(
    request: TrunkRequest,
    dataset: str,
    data: str | None,
    first_task: Callable[[Source], tuple[str, ...]],
    seed: int,
    reporter: Reporter,
) -> Trunk:
    """Learn filters from training images of the first task, whose classes `first_task` returns.

    Later tasks and test images have no influence, so that tasks can be added to the run one by one.
    """
    options, size = patch_options(request), request.size or SIZE
    spec = ImageSpec(height=size, width=size, mode="RGB")
    source = load_source(dataset, spec, data, Lister(spec, reporter))
    labels = first_task(source)
    images = source.train.of(labels)
    images = images if source.validation is None else join([images, source.validation.of(labels)])
    count = min(len(images), MOST_IMAGES, MOST_BYTES // (size * size * 3))
    # Evenly, because images are in the order of their classes.
    some = images.at(np.linspace(0, len(images) - 1, count).astype(int)) if count else images
    pixels, _ = reread(some, spec)
    if not len(pixels):
        raise DataError(f"no image of {', '.join(labels)} to learn filters from")
    reporter.print(
        f"learning {options['count']} filters of {options['side']}x{options['side']} pixels from {len(pixels)} images "
        f"of the first task, without their labels"
    )
    return as_trunk(learn_patches(pixels, seed_from(seed, 0, request.name), **options), size)
