"""The classes and images of each task."""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serving.bundle.labels import NEW_LABEL, alike, did_you_mean, is_new_label, same_label
from training.config import RunConfig, Tasks
from training.data.images import LEAST_TAUGHT, LEAST_TESTED, DataError, Images, Source
from training.host.device import has_room

_LABEL = re.compile(r'\s*(?:"((?:[^"]|"")+)"|([^,;]*?))\s*([,;]|$)')
"""A label in double quotes (doubled inside), or one without commas and semicolons; and the separator after it."""


@dataclass(frozen=True)
class Batchable:
    """Images as uint8 [n, channels, height, width], with their classes within the task [n] on the device that learns.

    The images are on the device too if they fit, so that nothing has to be copied during learning.
    """

    pixels: Tensor
    local_classes: Tensor

    def __len__(self) -> int:
        return len(self.local_classes)

    def class_counts(self) -> list[int]:
        """The number of images of each class."""
        counts: list[int] = torch.bincount(self.local_classes).tolist()
        return counts

    @property
    def device(self) -> torch.device:
        return self.local_classes.device

    @property
    def place(self) -> torch.device:
        """Where the pixels are."""
        return self.pixels.device

    def images(self, index: Tensor | slice) -> Tensor:
        """Some of the images as floats in [0, 1], on the device."""
        return to_unit(self._fetched(index))

    def in_turn(self, indices: Iterable[Tensor]) -> Iterator[Tensor]:
        """`images` of one batch after another; images in main memory are copied while the batch before is learned."""
        if self.pixels.device == self.device:
            yield from map(self.images, indices)
            return
        beside = side_stream(self.device)
        ahead: tuple[Tensor, torch.cuda.Event | None] | None = None
        for index in indices:
            with torch.cuda.stream(beside):
                fetched = self._fetched(index)
                arrival = None if beside is None else beside.record_event()
            if ahead is not None:
                yield self._arrived(*ahead)
            ahead = fetched, arrival
        if ahead is not None:
            yield self._arrived(*ahead)

    def _fetched(self, index: Tensor | slice) -> Tensor:
        chosen = self.pixels[index]
        if chosen.device != self.device:
            # From pinned memory the copy overlaps with the work of the GPU.
            chosen = chosen.pin_memory().to(self.device, non_blocking=True)
        return chosen

    def _arrived(self, fetched: Tensor, arrival: torch.cuda.Event | None) -> Tensor:
        """Make a batch that was copied on the side stream available to the stream that learns."""
        if arrival is not None:
            learning = torch.cuda.current_stream(self.device)
            learning.wait_event(arrival)
            # Its memory must not be reused before that stream is done with it.
            fetched.record_stream(learning)
        return to_unit(fetched)


@dataclass(frozen=True)
class TaskData:
    """The training and validation images of one task."""

    labels: tuple[str, ...]
    train: Batchable
    validation: Batchable

    @property
    def classes(self) -> int:
        return len(self.labels)

    def digest(self) -> str:
        """A hash of the images, their split and their order."""
        digest = hashlib.sha256()
        for part in (self.train, self.validation):
            for tensor in (part.pixels, part.local_classes):
                digest.update(f"{tuple(tensor.shape)}".encode())
                digest.update(tensor.cpu().contiguous().numpy().data)
        return digest.hexdigest()


def side_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A stream on which a GPU copies while it computes; None on other devices."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def to_unit(pixels: Tensor) -> Tensor:
    """uint8 to floats in [0, 1]."""
    return pixels.to(torch.float32) / 255


def to_device(pixels: NDArray[np.uint8], device: torch.device) -> Tensor:
    """uint8 [n, height, width, channels] to [n, channels, height, width] on the device."""
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))).to(device)


def parse_tasks(text: str) -> Tasks:
    """ "cat,dog; ship,truck" -> (("cat", "dog"), ("ship", "truck")); a label with a comma is put in double quotes."""
    tasks: list[list[str]] = [[]]
    for quoted, plain, after in _LABEL.findall(text):
        if label := quoted.replace('""', '"') or plain.strip():
            tasks[-1].append(label)
        if after == ";":
            tasks.append([])
    return tuple(tuple(task) for task in tasks if task)


def in_tasks_of(classes: Sequence[str], size: int) -> Tasks:
    """Consecutive classes, `size` per task; the last task may be smaller."""
    if size < 1:
        raise ValueError(f"classes per task is {size}; allowed: 1 or more")
    return tuple(tuple(classes[start : start + size]) for start in range(0, len(classes), size))


def check_names(labels: Iterable[str]) -> None:
    """Raise a DataError that lists the labels that no new class may have, or that look the same."""
    labels = list(labels)
    if twins := alike(labels):
        shown = "; ".join(" and ".join(map(ascii, some)) for some in twins)
        raise DataError(f"class names that look the same: got {shown}; allowed: different names; rename their folders")
    if refused := [label for label in labels if not is_new_label(label)]:
        raise DataError(f"class names: got {', '.join(map(repr, refused))}; allowed: {NEW_LABEL}; rename their folders")


def check_classes(tasks: Tasks, classes: Sequence[str]) -> None:
    """Raise a DataError if a class of a task is not among those that have images."""
    missing = [label for task in tasks for label in task if label not in classes]
    if missing:
        close = "".join(did_you_mean(label, classes) for label in missing)
        raise DataError(f"no images of {', '.join(map(repr, missing))}; the data has: {', '.join(classes)}{close}")


def too_few(source: Source, config: RunConfig, task: int) -> list[str]:
    """The classes of a task that have too few images, each with how many it has."""
    if source.validation is not None:
        return []  # the source has split them, with some on each side
    taught, tested = (Counter(images.labels.tolist()) for images in (source.train, source.test))
    return [
        f"{label!r} of task {task} has {taught[label]} to learn from and {tested[label]} to test on"
        for label in config.tasks[task]
        if taught[label] < LEAST_TAUGHT or tested[label] < LEAST_TESTED
    ]


def check_new(tasks: Tasks, config: RunConfig) -> None:
    """Raise a DataError if the run already has one of these classes."""
    for task, labels in enumerate(config.tasks):
        if again := [label for label in labels if any(same_label(label, added) is not None for added in tasks)]:
            raise DataError(
                f"task {task} has already learned {', '.join(map(repr, again))}, and a class belongs to one task; "
                "give new classes only"
            )


def task_split(source: Source, config: RunConfig, task: int) -> tuple[Images, Images]:
    """The training and validation images of one task, and no image of another task."""
    labels = config.tasks[task]
    train = source.train.of(labels)
    if (limit := config.preset.images_per_class) is not None:
        train = _at_most(train, limit, config.seed)
    if source.validation is None:
        return train.split(config.preset.validation_share, config.seed)
    return train, source.validation.of(labels)


def task_data(source: Source, config: RunConfig, task: int, device: torch.device) -> TaskData:
    """The training and validation images of one task as tensors, ready to be learned from."""
    labels = config.tasks[task]
    train, validation = task_split(source, config, task)
    place = device if has_room(device, train.pixels.nbytes) else torch.device("cpu")
    return TaskData(labels, _batchable(train, labels, device, place), _batchable(validation, labels, device, device))


def _batchable(images: Images, labels: Sequence[str], device: torch.device, place: torch.device) -> Batchable:
    """Classes on `device`, pixels on `place`."""
    position = {label: local_class for local_class, label in enumerate(labels)}
    local = torch.tensor([position[str(label)] for label in images.labels])
    return Batchable(to_device(images.pixels, place), local.to(device))


def _at_most(images: Images, limit: int, seed: int) -> Images:
    generator = np.random.default_rng(seed)
    chosen = [
        generator.permutation((images.labels == label).nonzero()[0])[:limit] for label in np.unique(images.labels)
    ]
    return images.at(np.sort(np.concatenate(chosen)))
