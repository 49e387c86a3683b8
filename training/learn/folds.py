"""Folds of a task's training images, so that every image can be scored by what was fitted without it."""

from __future__ import annotations

import torch
from torch import Tensor

FOLDS = 5
ENOUGH_VALIDATION = 200
"""With this many validation images or more, p-values are computed from them alone."""


def folds_of(local_classes: Tensor) -> Tensor:
    """The fold of each image [n], at random: each class has as many folds as it has images, up to FOLDS, of one size.

    The only image of a class has the fold -1: it is left out of no fit, which needs an image of every class.
    """
    fold = torch.full_like(local_classes, -1)
    for local_class, count in enumerate(torch.bincount(local_classes).tolist()):
        order = torch.randperm(count).to(fold.device)
        if count > 1:
            fold[local_classes == local_class] = order % min(FOLDS, count)
    return fold
