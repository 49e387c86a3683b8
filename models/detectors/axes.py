"""Directions in feature space, stored as 8-bit integers.

They are most of what a task stores besides its weights. They are rounded before anything is derived from them, so
nothing is approximated afterwards: the covariance or the subspace is a slightly different one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.detectors.score import FLOAT, GraphOps

LARGEST = 127
"""Axes are stored as integers up to this."""


def rounded(axes: Tensor) -> tuple[Tensor, Tensor]:
    """[4, features, axes] -> the same in 8 bits, and a scale for each axis [4, 1, axes]."""
    scales = (axes.abs().amax(dim=1, keepdim=True) / LARGEST).clamp(min=torch.finfo(axes.dtype).tiny)
    return (axes / scales).round().to(torch.int8), scales


def write_axes(ops: GraphOps, name: str, axes: Tensor, scales: Tensor) -> str:
    """Axes times their scales, as nodes that are computed when the graph is loaded."""
    stored, factors = ops.fitted(f"{name}/axes", axes), ops.fitted(f"{name}/scales", scales)
    return ops.fold("Mul", "scaled", [ops.fold("Cast", "float", [stored], to=FLOAT), factors])
