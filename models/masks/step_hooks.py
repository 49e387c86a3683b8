"""Hooks around the training step, through which a mask mechanism takes part in learning a task."""

from collections.abc import Iterable

import torch
from torch import Tensor

from models.masks.task_layer import TaskLayer


class StepHooks:
    """Called by the training loop in this order; the defaults do nothing. One object per task that is learned."""

    def begin_step(self, position: float) -> float:
        """The sharpness of soft masks in this step; `position` runs from 0 to 1 over the batches of every epoch."""
        return 1.0

    def regulariser(self) -> Tensor | None:
        """A term to add to the loss, after the forward pass."""
        return None

    def before_step(self) -> None:
        """After the backward pass and before the optimiser's step: gradients may be changed."""

    def after_step(self) -> None:
        """After the optimiser's step: parameters may be changed."""


class Protection(StepHooks):
    """Restores the entries of shared parameters that finished tasks depend on after every step.

    Masking gradients would not be enough: momentum, weight decay and adaptive step sizes move a parameter whose
    gradient is zero. It would also be wrong for LARS: the whole weight's norm over the norm of the few free entries'
    gradient makes the steps of a nearly full layer too long. So the optimiser sees whole gradients, as in the authors'
    code, and protected entries are put back after momentum.
    """

    def __init__(self, layers: Iterable[TaskLayer]) -> None:
        self._protected = [
            (parameter, frozen, parameter.detach().clone())
            for layer in layers
            for parameter, frozen in layer.frozen()
            if bool(frozen.any())
        ]

    @torch.no_grad()
    def after_step(self) -> None:
        for parameter, frozen, value in self._protected:
            parameter.copy_(torch.where(frozen, value, parameter))
