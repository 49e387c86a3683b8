"""What every layer that knows of tasks can do, and the selection that says which task is being computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass
class Selection:
    """The task a network computes for and how sharp HAT's gates are; one object, shared by all its layers.

    `sharpness` None means a finished task: gates are exactly 0 or 1. A compiled network takes it as a tensor.
    """

    task: int = 0
    sharpness: float | Tensor | None = None


class TaskLayer(nn.Module):
    """A layer with something of its own for each task. Tasks are added one at a time, in order."""

    def grow(self) -> None:
        """Make room for the next task."""

    def trainable(self, task: int) -> Iterator[nn.Parameter]:
        """What learning this task may change."""
        yield from ()

    def frozen(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Shared parameters with the entries (True) that finished tasks depend on."""
        yield from ()

    def shared_numbers(self) -> int:
        """How many numbers of this layer all tasks read."""
        return 0

    def task_numbers(self) -> int:
        """How many numbers of this layer each task has for itself when it answers."""
        return 0

    def finish(self, task: int) -> None:
        """The task is learned: fix what it uses."""
