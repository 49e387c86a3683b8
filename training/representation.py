"""Step 1: learn a task's features, and forget nothing."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from models.network import Network
from models.unit_mask import sparsity
from training.augment import Augmentation, eight_views, standard_view
from training.config import FeatureLearning
from training.device import mixed_precision
from training.losses import supervised_contrastive
from training.optimizers import set_lr, warmup_cosine
from training.protection import Protection
from training.tasks import Batchable, TaskData


def batches(data: Batchable, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The data once, in random order: images in [0, 1] and classes."""
    for index in torch.randperm(len(data)).split(size):
        index = index.to(data.pixels.device)
        yield data.images(index), data.local_classes[index]


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
    masks = network.unit_masks()
    weight = how.sparsity_first if task == 0 else how.sparsity_later
    count = -(-len(data.train) // how.batch_size)
    for epoch in epochs:
        total = 0.0
        for batch, (images, classes) in enumerate(batches(data.train, how.batch_size)):
            progress = (epoch + (batch + 0.5) / count) / how.epochs
            set_lr(optimizer, how.lr * warmup_cosine(progress, how.warmup_epochs / how.epochs, how.warmup_start))
            sharpness = sharpness_at(batch / max(count - 1, 1), how.max_sharpness)
            loss = _loss(network, task, images, classes, how, views, sharpness)
            total += loss.item() * len(images)
            if masks:
                loss = loss + weight * sparsity(masks)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            protection.mask_gradients()
            for mask in masks:
                mask.compensate(task, sharpness, how.max_sharpness)
            optimizer.step()
            protection.restore()
            for mask in masks:
                mask.clamp(task)
        yield total / len(data.train)


def _loss(
    network: Network,
    task: int,
    images: Tensor,
    classes: Tensor,
    how: FeatureLearning,
    views: Augmentation,
    sharpness: float,
) -> Tensor:
    """What a batch costs: CSI's contrastive loss over eight views of each image, or the head's cross-entropy on one."""
    head = network.head(task)
    if how.loss == "ce":
        with mixed_precision(images.device):
            logits = head.all_logits(network.features(standard_view(images, views), task, sharpness))
        return functional.cross_entropy(logits.float(), classes)
    turned, turned_classes = eight_views(images, classes, head.classes, views)
    with mixed_precision(images.device):
        vectors = network.project(turned, task, sharpness)
    return supervised_contrastive(vectors.float(), turned_classes, how.temperature)
