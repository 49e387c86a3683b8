"""Step 1: learn a task's features with the supervised contrastive loss, and forget nothing."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from models.joint import processes, summed
from models.network import Network
from models.unit_mask import sparsity
from training.augment import VIEWS, Augmentation, eight_views
from training.config import FeatureLearning
from training.device import laid_out, mixed_precision
from training.losses import supervised_contrastive
from training.optimizers import set_lr, warmup_cosine
from training.protection import Protection
from training.tasks import Batchable, TaskData
from training.together import Share, add_up_gradients, own_draws


def batches(data: Batchable, size: int) -> Iterator[tuple[Tensor, Tensor, Share]]:
    """The data once, in random order: images in [0, 1] and classes, of each batch the share of this process."""
    for index in torch.randperm(len(data)).split(size):
        share = Share.of(len(index))
        index = index[share.rows].to(data.pixels.device)
        yield data.images(index), data.local_classes[index], share


def sharpness_at(position: float, maximum: float) -> float:
    """HAT's s: from 1 / maximum at the first batch of an epoch (position 0) to maximum at the last (1)."""
    return 1 / maximum + (maximum - 1 / maximum) * position


def learn_features(
    network: Network,
    task: int,
    data: TaskData,
    how: FeatureLearning,
    views: Augmentation,
    optimizer: torch.optim.Optimizer,
    epochs: range,
) -> Iterator[float]:
    """Learn for the given epochs, one each time the next mean loss is asked for."""
    network.train()
    protection = Protection(network)
    masks, trainable = network.unit_masks(), network.trainable(task)
    weight = how.sparsity_first if task == 0 else how.sparsity_later
    count = -(-len(data.train) // how.batch_size)
    device = data.train.device
    for epoch in epochs:
        # On the device: asking for the loss of every step would wait for the GPU every time.
        total = torch.zeros((), dtype=torch.float64, device=device)
        for batch, (images, classes, share) in enumerate(batches(data.train, how.batch_size)):
            progress = (epoch + (batch + 0.5) / count) / how.epochs
            set_lr(optimizer, how.lr * warmup_cosine(progress, how.warmup_epochs / how.epochs))
            sharpness = sharpness_at(batch / max(count - 1, 1), how.max_sharpness)
            turned, turned_classes = eight_views(images, classes, data.classes, views, share)
            with mixed_precision(device), own_draws(network.config.dropout, batch):
                vectors = network.project(laid_out(turned, device), task, sharpness)
            loss = supervised_contrastive(vectors.float(), turned_classes, how.temperature, share.times(VIEWS))
            total += loss.detach().double() * share.total
            if masks:
                # Every process has the whole of this term: each contributes an equal part.
                loss = loss + weight * sparsity(masks) / processes()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            add_up_gradients(trainable)
            protection.mask_gradients()
            for mask in masks:
                mask.compensate(task, sharpness, how.max_sharpness)
            optimizer.step()
            protection.restore()
            for mask in masks:
                mask.clamp(task)
        yield summed(total).item() / len(data.train)
