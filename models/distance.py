"""How far an image is from each class of a task, in the features that the task's own network sees."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.heads import ROTATIONS

SHRINKAGE = 0.1


class ClassDistances(nn.Module):
    """Mahalanobis distance to every class mean, one tied covariance a rotation, averaged over the four rotations.

    Fitted once, on the task's own training images, when the task is learned. Stores means and covariances, no image.
    """

    means: Tensor
    whitening: Tensor

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes = classes
        self.register_buffer("means", torch.empty(ROTATIONS, classes, 0))
        self.register_buffer("whitening", torch.empty(ROTATIONS, 0, 0))

    def fit(self, features: Tensor, local_classes: Tensor) -> None:
        """[4, n, live features] of the training images and their classes [n]."""
        directions = functional.normalize(features.double(), dim=2)
        count = directions.shape[2]
        means, whitening = [], []
        for rotated in directions:
            centre = torch.stack([rotated[local_classes == c].mean(dim=0) for c in range(self.classes)])
            residual = rotated - centre[local_classes]
            covariance = residual.T @ residual / len(residual)
            spherical = covariance.diagonal().mean().clamp(min=1e-12) * torch.eye(count, device=covariance.device)
            shrunk = (1 - SHRINKAGE) * covariance + SHRINKAGE * spherical
            # Dividing by the number of features makes tasks with different numbers of live units comparable.
            factor = torch.linalg.cholesky(torch.linalg.inv(shrunk)) / count**0.5
            whitening.append(factor)
            means.append(centre @ factor)
        device = features.device
        self.means = torch.stack(means).float().to(device)
        self.whitening = torch.stack(whitening).float().to(device)

    def forward(self, features: Tensor) -> Tensor:
        """[4, n, live features] -> [n, classes] squared distance per live feature."""
        white = torch.bmm(functional.normalize(features, dim=2), self.whitening)
        return (white[:, :, None] - self.means[:, None]).square().sum(dim=3).mean(dim=0)
