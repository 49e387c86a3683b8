"""ViM: the part of the features outside the directions in which a task's images vary, less the energy."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from models.config import ROTATIONS
from models.detectors.axes import rounded, write_axes
from models.detectors.logit_scores import energy, write_energy
from models.detectors.score import Features, GraphOps, Means, UnknownScore

RESIDUAL_RANK = 32
POWER_STEPS = 4
LEAST_RESIDUAL = 1e-3


class Vim(UnknownScore):
    """ViM's virtual logit (Wang et al., 2022) against the energy of the others."""

    mean: Tensor  # [4, 1, features]
    axes: Tensor  # [4, features, rank], 8-bit integers; times the scales, orthonormal columns but for rounding
    scales: Tensor  # [4, 1, rank], of the axes
    gain: Tensor  # []

    def __init__(self, name: str, classes: int) -> None:
        super().__init__(name, classes)
        self.register_buffer("mean", torch.zeros(ROTATIONS, 1, 0))
        self.register_buffer("axes", torch.zeros(ROTATIONS, 0, 0, dtype=torch.int8))
        self.register_buffer("scales", torch.ones(ROTATIONS, 1, 0))
        self.register_buffer("gain", torch.ones(()))

    @property
    def needs(self) -> tuple[str, ...]:
        return (self.name, "logits")

    def fit(self, features: Features, local_classes: Tensor, logits: Tensor) -> None:
        """The mean residual of the training images becomes as large as their mean largest logit."""
        deep = features.deep
        # At most half of the directions: with few features, only rounding errors would be left outside of more.
        found = max(1, min(RESIDUAL_RANK, deep.shape[1], deep.shape[2] // 2))
        self.mean = deep.mean(dim=1, keepdim=True)
        found_axes = [torch.svd_lowrank(part, q=found, niter=POWER_STEPS)[2] for part in deep - self.mean]
        self.axes, self.scales = rounded(torch.stack(found_axes))
        self.gain = torch.ones((), device=deep.device)
        largest = abs(float(logits.amax(dim=1).mean()))
        self.gain = largest / self.measure(features).mean().clamp(min=LEAST_RESIDUAL)

    def measure(self, features: Features) -> Tensor:
        """[4, n, 1], the length of the residual."""
        centred = features.deep - self.mean
        axes = self.axes * self.scales
        outside = centred - torch.bmm(torch.bmm(centred, axes), axes.transpose(1, 2))
        length: Tensor = torch.linalg.vector_norm(outside, dim=2, keepdim=True)
        return self.gain * length

    def score(self, means: Means) -> Tensor:
        return means[self.name] + energy(means)

    def write_measure(self, ops: GraphOps, features: Mapping[str, str]) -> str:
        name = self.name
        mean, axes = ops.fitted(f"{name}/mean", self.mean), write_axes(ops, name, self.axes, self.scales)
        centred = ops.add("Sub", f"{name}/centred", [features["deep"], mean])
        back = ops.fold("Transpose", "back", [axes], perm=[0, 2, 1])
        inside = ops.add("MatMul", f"{name}/inside", [ops.add("MatMul", f"{name}/along", [centred, axes]), back])
        outside = ops.add("Sub", f"{name}/outside", [centred, inside])
        length = ops.add("ReduceL2", f"{name}/length", [outside, ops.constant("last_axis", [-1])], keepdims=1)
        return ops.add("Mul", f"{name}/scaled", [length, ops.fitted(f"{name}/gain", self.gain)])

    def write_score(self, ops: GraphOps, means: Mapping[str, str]) -> str:
        return ops.add("Add", "", [means[self.name], write_energy(ops, means)])
