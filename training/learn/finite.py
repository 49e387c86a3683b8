"""A check of every epoch: what is not finite must never reach a checkpoint."""

from __future__ import annotations

import math

import torch

from training.store.checkpoint import RunError


def check_finite(where: str, loss: float, optimizer: torch.optim.Optimizer) -> None:
    """NaN or infinity would contaminate all later tasks, so it is never checkpointed."""
    weights = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not math.isfinite(loss):
        got = f"the loss is {loss}"
    elif not all(bool(weight.isfinite().all()) for weight in weights):
        got = "the last step left weights that are not finite"
    else:
        return
    raise RunError(
        f"{where}: {got}; allowed: finite numbers. The checkpoint before it is kept, but --resume would end in the "
        "same way: start again in another --out, with another --seed or a smaller learning rate (training/presets.py)"
    )
