"""ViM's share of the features: what lies outside the directions in which a task's images vary."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.heads import ROTATIONS

RESIDUAL_RANK = 32
POWER_STEPS = 4
LEAST_RESIDUAL = 1e-3


class PrincipalResidual(nn.Module):
    """ViM's virtual logit: how much of the features lies outside the directions in which the task's images vary."""

    mean: Tensor  # [4, 1, features]
    axes: Tensor  # [4, features, rank], orthonormal columns
    gain: Tensor  # []

    def __init__(self, features: int = 0) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(ROTATIONS, 1, features))
        self.register_buffer("axes", torch.zeros(ROTATIONS, features, min(RESIDUAL_RANK, features)))
        self.register_buffer("gain", torch.ones(()))

    def fit(self, features: Tensor, largest_logit: float) -> None:
        """[4, n, features] of the training images; the mean residual becomes as large as the mean largest logit."""
        # Half of the directions at most: of few features, all but rounding would lie within as many as these.
        found = max(1, min(RESIDUAL_RANK, features.shape[1], features.shape[2] // 2))
        self.mean = features.mean(dim=1, keepdim=True)
        self.axes = torch.stack(
            [torch.svd_lowrank(part, q=found, niter=POWER_STEPS)[2] for part in features - self.mean]
        )
        self.gain = torch.ones((), device=features.device)
        self.gain = abs(largest_logit) / self.each_rotation(features).mean().clamp(min=LEAST_RESIDUAL)

    def each_rotation(self, features: Tensor) -> Tensor:
        """[4, n, features] -> [4, n, 1]."""
        centred = features - self.mean
        outside = centred - torch.bmm(torch.bmm(centred, self.axes), self.axes.transpose(1, 2))
        length: Tensor = torch.linalg.vector_norm(outside, dim=2, keepdim=True)
        return self.gain * length
