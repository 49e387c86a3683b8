"""Units between two layers, and HAT's gates over them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from models.task_layer import Selection, TaskLayer

LOGIT_LIMIT = 6.0
EXPONENT_LIMIT = 50.0


class Units(TaskLayer):
    """`channels` units that are open to every task: input pixels, or any layer of a network without gates."""

    taken: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels
        self.register_buffer("taken", torch.ones(channels, dtype=torch.bool), persistent=False)

    def gate(self) -> Tensor | None:
        """Gate values of the selected task [channels]; None where every unit is open."""
        return None

    def live(self, task: int) -> Tensor:
        """Indices of the units that a finished task uses."""
        return torch.arange(self.channels, device=self.taken.device)


class Wires(NamedTuple):
    """The units that a layer of weights joins; each unit before it covers `spread` of its inputs.

    A plain tuple, so that a mask between two layers is not registered twice as their submodule.
    """

    before: Units
    after: Units
    spread: int = 1

    def live_part(self, weight: Tensor, task: int) -> Tensor:
        """The rows and columns of [after, before * spread, ...] weights that a finished task uses."""
        inputs = self.before.live(task)[:, None] * self.spread
        inputs = (inputs + torch.arange(self.spread, device=inputs.device)).flatten()
        return weight[self.after.live(task)][:, inputs].clone()


class UnitMask(Units):
    """Per-task gates over `channels` units: sigmoid(sharpness * logit) while learning, 0 or 1 for ever after."""

    def __init__(self, channels: int, selection: Selection) -> None:
        super().__init__(channels)
        self.selection = selection
        self.logits = nn.ParameterList()
        self.register_buffer("taken", torch.zeros(channels, dtype=torch.bool))

    def grow(self) -> None:
        self.logits.append(nn.Parameter(torch.randn(self.channels, device=self.taken.device)))

    def trainable(self, task: int) -> Iterator[nn.Parameter]:
        yield self.logits[task]

    def task_numbers(self) -> int:
        return self.channels

    def gate(self) -> Tensor:
        logit: Tensor = self.logits[self.selection.task]
        if self.selection.sharpness is None:
            return (logit > 0).to(logit.dtype)
        return torch.sigmoid(self.selection.sharpness * logit)

    def live(self, task: int) -> Tensor:
        opened: Tensor = self.logits[task] > 0
        return opened.nonzero().flatten()

    def finish(self, task: int) -> None:
        if not (self.logits[task] > 0).any():
            # A layer with every gate shut would answer the same for any image: open the one that was nearest to it.
            with torch.no_grad():
                self.logits[task][self.logits[task].argmax()] = 1.0
        self.taken |= self.logits[task] > 0

    def compensate(self, task: int, sharpness: float, max_sharpness: float) -> None:
        """Undo what annealing does to the logits' gradient (HAT, Eq. 5), before the optimiser's step."""
        logit = self.logits[task]
        if logit.grad is None:
            return
        scaled = (sharpness * logit.detach()).clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT)
        factor = (torch.cosh(scaled) + 1) / (torch.cosh(logit.detach()) + 1)
        logit.grad.mul_(factor * (max_sharpness / sharpness))

    def clamp(self, task: int) -> None:
        """Keep the logits where the sigmoid still has a gradient, after the optimiser's step."""
        with torch.no_grad():
            self.logits[task].clamp_(-LOGIT_LIMIT, LOGIT_LIMIT)


def sparsity(masks: Iterable[UnitMask]) -> Tensor:
    """Share of the units free so far that the selected task opens (the paper's L_r without its lambda)."""
    opened, free = [], []
    for mask in masks:
        available = (~mask.taken).to(torch.float32)
        opened.append((mask.gate() * available).sum())
        free.append(available.sum())
    return torch.stack(opened).sum() / torch.stack(free).sum().clamp(min=1)
