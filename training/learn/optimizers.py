"""Optimisers and learning-rate schedules: LARS as in the paper's runs, warm-up, cosine and steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

TRUST = 0.001


class Lars(torch.optim.SGD):
    """SGD with momentum whose step on each parameter is at most TRUST of the parameter's norm.

    Both norms are those of the whole parameter and its whole gradient, including entries that finished tasks protect.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, lr=lr, momentum=0.9)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                size, slope = parameter.norm(), parameter.grad.norm()
                ratio = TRUST * size / (slope * group["lr"]).clamp(min=1e-12)
                # A parameter that is zero has no norm to scale the step by: it takes the plain step.
                parameter.grad.mul_(torch.where(size > 0, ratio.clamp(max=1.0), torch.ones_like(ratio)))
        return super().step(closure)


def make_optimizer(name: str, parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """`adam`, `lars`, or plain `sgd`."""
    if name == "lars":
        return Lars(parameters, lr)
    if name == "adam":
        return torch.optim.Adam(parameters, lr=lr, fused=True)
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=lr)
    raise ValueError(f"optimizer is {name!r}; allowed: adam, lars, sgd")


def warmup_cosine(progress: float, warmup: float, start: float = 0.0) -> float:
    """The share of the full learning rate at `progress` (0 to 1) of a phase, rising from `start` until `warmup`."""
    if progress < warmup:
        return start + (1 - start) * progress / warmup
    return 0.5 * (1 + math.cos(math.pi * (progress - warmup) / max(1 - warmup, 1e-9)))


def tenfold_steps(progress: float, milestones: Sequence[float]) -> float:
    """The share of the full learning rate at `progress` of a phase: divided by ten after each milestone."""
    return float(0.1 ** sum(progress >= milestone for milestone in milestones))


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
