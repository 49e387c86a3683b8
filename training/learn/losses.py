"""The supervised contrastive loss."""

import torch
from torch import Tensor

from training.host.distributed import Share


def supervised_contrastive(vectors: Tensor, classes: Tensor, temperature: float, share: Share | None = None) -> Tensor:
    """Mean over the batch of -log softmax similarity to the images of the same class (the paper's L_c).

    vectors [n, d] of unit length, classes [n]. The only image of its class in a batch counts as zero. If these are a
    `share` of a joint batch, each is compared with the whole batch, and the result is the share's part of the mean.
    """
    share = share or Share.whole(len(vectors))
    all_vectors, all_classes = share.gather(vectors), share.gather(classes)
    similarity = vectors @ all_vectors.T / temperature
    places = torch.arange(share.total, device=vectors.device)
    itself = places[share.rows, None] == places
    similarity = similarity.masked_fill(itself, -torch.inf)
    log_likelihood = similarity - torch.logsumexp(similarity, dim=1, keepdim=True)
    positive = (classes[:, None] == all_classes[None, :]) & ~itself
    total = log_likelihood.masked_fill(~positive, 0).sum(dim=1)
    return -(total / positive.sum(dim=1).clamp(min=1)).sum() / share.total
