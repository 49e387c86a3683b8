"""Remembering: what finished tasks use is put back after every step, whatever the optimiser did to it."""

from __future__ import annotations

import torch

from models.network import Network


class Protection:
    """The entries of shared parameters that finished tasks depend on, and their values.

    Masking gradients alone is not enough: momentum, weight decay and adaptive step sizes move a parameter whose
    gradient is zero. Gradients are masked all the same, so that trust ratios see only what may move.
    """

    def __init__(self, network: Network) -> None:
        self._kept = [
            (parameter, frozen, parameter.detach().clone())
            for layer in network.task_layers()
            for parameter, frozen in layer.frozen()
            if bool(frozen.any())
        ]

    @torch.no_grad()
    def mask_gradients(self) -> None:
        """Before the optimiser's step."""
        for parameter, frozen, _ in self._kept:
            if parameter.grad is not None:
                parameter.grad.masked_fill_(frozen, 0)

    @torch.no_grad()
    def restore(self) -> None:
        """After the optimiser's step."""
        for parameter, frozen, value in self._kept:
            parameter.copy_(torch.where(frozen, value, parameter))
