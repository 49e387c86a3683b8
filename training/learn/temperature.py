"""The scale of logits that makes their softmax match how often a task is right on images that it did not learn from."""

from __future__ import annotations

import torch
from torch import Tensor


def temperature_scale(logits: Tensor, local_classes: Tensor) -> float:
    """The scale in [0.01, 100] with the smallest cross-entropy on Platt's smoothed targets."""
    count, classes = logits.shape
    if classes == 1:
        return 1.0
    off = 1 / (count + classes)
    targets = torch.full_like(logits, off)
    targets.scatter_(1, local_classes[:, None], 1 - off * (classes - 1))
    scales = torch.logspace(-2, 2, 401, dtype=logits.dtype, device=logits.device)
    losses = torch.stack([-(targets * torch.log_softmax(scale * logits, dim=1)).sum() for scale in scales])
    return float(scales[losses.argmin()])
