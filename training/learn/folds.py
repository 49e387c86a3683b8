"""Folds of a task's training images, so that every image can be scored by what was fitted without it."""

from __future__ import annotations

import torch
from torch import Tensor

FOLDS = 5
ENOUGH_VALIDATION = 200
"""With this many validation images or more, p-values are computed from them alone."""


def folds_of(local_classes: Tensor) -> Tensor:
    """The fold of each image [n], at random but the same number of each class; none if a class has a single image."""
    counts = torch.bincount(local_classes)
    folds = min(FOLDS, int(counts.min()))
    fold = torch.empty_like(local_classes)
    for local_class, count in enumerate(counts.tolist()):
        order = torch.randperm(count).to(fold.device)
        fold[local_classes == local_class] = order % folds
    return fold if folds > 1 else fold[:0]
