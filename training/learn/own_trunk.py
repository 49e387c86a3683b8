"""A trunk that is learned from the images of the run itself, without their labels: `--trunk patches`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from models.trunks.patches import SIZE, as_trunk, learn_patches, patch_options, random_patches, seconds_to_learn
from models.trunks.trunk import Trunk, TrunkRequest
from serving.bundle.sections import ImageSpec
from training.data.datasets import load_source
from training.data.encoder import Encoder
from training.data.images import DataError, Source, join
from training.data.lister import Lister
from training.data.originals import Original
from training.data.reread import reread
from training.host.seeds import seed_from
from training.show.console import Reporter

SAMPLED_TO_READ = 5
"""Images by which it is measured how long all take."""
MOST_IMAGES, MOST_BYTES = 4000, 200_000_000
"""Images that filters are learned from, and their pixels in memory."""


READING, FILTERS = "reading images", "learning filters"
"""The phases of it."""


def stand_in_for(request: TrunkRequest) -> Trunk:
    """A trunk of random filters, which encodes an image as fast as the one that is to be learned."""
    return as_trunk(random_patches(**patch_options(request)), request.size or SIZE)


def phases_to_learn(request: TrunkRequest, count: int, encoder: Encoder, some: Sequence[Original]) -> dict[str, float]:
    """The phases before images are encoded, and their seconds: all images are read once, then filters are learned."""
    each = encoder.seconds_per_image(some[:SAMPLED_TO_READ])
    return {READING: each * count, FILTERS: seconds_to_learn(**patch_options(request))}


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
    with reporter.phase(FILTERS):
        patches = learn_patches(pixels, seed_from(seed, 0, request.name), **options)
    return as_trunk(patches, size)
