"""What learning minimises."""

from __future__ import annotations

import torch
from torch import Tensor


def supervised_contrastive(vectors: Tensor, classes: Tensor, temperature: float) -> Tensor:
    """Mean over the batch of -log softmax similarity to the images of the same class (the paper's L_c).

    vectors [n, d] of unit length, classes [n]. An image whose class is alone in the batch has nothing to be near
    to and counts as zero.
    """
    similarity = vectors @ vectors.T / temperature
    itself = torch.eye(len(vectors), dtype=torch.bool, device=vectors.device)
    similarity = similarity.masked_fill(itself, -torch.inf)
    log_likelihood = similarity - torch.logsumexp(similarity, dim=1, keepdim=True)
    positive = (classes[:, None] == classes[None, :]) & ~itself
    total = log_likelihood.masked_fill(~positive, 0).sum(dim=1)
    return -(total / positive.sum(dim=1).clamp(min=1)).mean()
