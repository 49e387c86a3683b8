"""A few training images of every class learned so far, for runs with a buffer (the paper's +c)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from training.data.tasks import Batchable
from training.host.seeds import seed_from


@dataclass(frozen=True)
class Buffer:
    """`pixels`, uint8 [n, channels, height, width], of `class_ids` [n]; those of one class are in random order."""

    pixels: Tensor
    class_ids: Tensor

    def __len__(self) -> int:
        return len(self.class_ids)


def keep_some(before: Buffer | None, task: int, data: Batchable, classes: int, size: int, seed: int) -> Buffer:
    """The buffer after a task with `classes` new classes: at most `size` images, the same number per class.

    The choice depends on the seed alone, so a run that is killed and resumed keeps the same images.
    """
    generator = torch.Generator().manual_seed(seed_from(seed, task, "buffer"))
    local_classes = data.local_classes.cpu()
    order = torch.randperm(len(data), generator=generator)
    order = order[local_classes[order].argsort(stable=True)]
    first = 0 if before is None else int(before.class_ids.max()) + 1
    pixels, class_ids = data.pixels.cpu()[order], local_classes[order] + first
    if before is not None:
        pixels, class_ids = torch.cat([before.pixels, pixels]), torch.cat([before.class_ids, class_ids])
    seen = first + classes
    own = [(class_ids == class_id).nonzero().flatten()[: quota(size, seen, class_id)] for class_id in range(seen)]
    kept = torch.cat(own)
    return Buffer(pixels[kept].contiguous(), class_ids[kept].contiguous())


def quota(size: int, classes: int, class_id: int) -> int:
    """The number of images of this class, if `classes` classes share `size` images; the first ones get the rest."""
    return size // classes + (class_id < size % classes)
