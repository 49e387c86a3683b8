"""Step 1: learn a task's features, and forget nothing."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from models.joint import processes, summed
from models.network import Network
from models.unit_mask import sparsity
from training.augment import VIEWS, Augmentation, eight_views, standard_view
from training.config import FeatureLearning
from training.device import See, compiled, laid_out, mixed_precision
from training.losses import supervised_contrastive
from training.optimizers import set_lr, warmup_cosine
from training.protection import Protection
from training.tasks import Batchable, TaskData
from training.together import Share, add_up_gradients, own_draws


def batch_sizes(total: int, size: int, least: int = 1) -> list[int]:
    """How many images each batch of an epoch has; a last one of fewer than `least` joins the one before it."""
    sizes = [min(size, total - start) for start in range(0, total, size)]
    if len(sizes) > 1 and sizes[-1] < least:
        sizes[-2:] = [sizes[-2] + sizes[-1]]
    return sizes


def batches(data: Batchable, size: int, least: int = 1) -> Iterator[tuple[Tensor, Tensor, Share]]:
    """The data once, in random order: images in [0, 1] and classes, of each batch the share of this process."""
    parts = torch.randperm(len(data)).split(batch_sizes(len(data), size, least))
    shares = [Share.of(len(part)) for part in parts]
    own = [part[share.rows].to(data.pixels.device) for part, share in zip(parts, shares, strict=True)]
    for images, index, share in zip(data.in_turn(own), own, shares, strict=True):
        yield images, data.local_classes[index], share


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
    *,
    compiling: bool = False,
) -> Iterator[float]:
    """Learn for the given epochs, one each time the next mean loss is asked for."""
    network.train()
    see: See = network.project if how.loss == "csi" else network.features
    if compiling:
        see = compiled(see)
    protection = Protection(network)
    masks, trainable = network.unit_masks(), network.trainable(task)
    weight = how.sparsity_first if task == 0 else how.sparsity_later
    # A norm finds no variance in the one pixel that a small image may end as; CSI shows it eight views of each.
    least = 2 if how.loss == "ce" else 1
    count = len(batch_sizes(len(data.train), how.batch_size, least))
    device = data.train.device
    for epoch in epochs:
        # On the device: asking for the loss of every step would wait for the GPU every time.
        total = torch.zeros((), dtype=torch.float64, device=device)
        for batch, (images, classes, share) in enumerate(batches(data.train, how.batch_size, least)):
            progress = (epoch + (batch + 0.5) / count) / how.epochs
            set_lr(optimizer, how.lr * warmup_cosine(progress, how.warmup_epochs / how.epochs, how.warmup_start))
            # One batch is first and last at once: there the epochs of the task take the place of an epoch's batches.
            position = batch / (count - 1) if count > 1 else epoch / max(how.epochs - 1, 1)
            sharpness = sharpness_at(position, how.max_sharpness)
            loss = _loss(network, see, task, images, classes, share, how, views, sharpness, batch)
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


def _loss(
    network: Network,
    see: See,
    task: int,
    images: Tensor,
    classes: Tensor,
    share: Share,
    how: FeatureLearning,
    views: Augmentation,
    sharpness: float,
    batch: int,
) -> Tensor:
    """This process's part of what a batch costs: CSI's contrastive loss over eight views of each image, or the head's
    cross-entropy on one."""
    head, device = network.head(task), images.device
    if how.loss == "ce":
        seen = laid_out(standard_view(images, views, share), device)
        with mixed_precision(device), own_draws(network.config.dropout, batch):
            logits = head.all_logits(see(seen, task, sharpness))
        return functional.cross_entropy(logits.float(), classes, reduction="sum") / share.total
    turned, turned_classes = eight_views(images, classes, head.classes, views, share)
    with mixed_precision(device), own_draws(network.config.dropout, batch):
        vectors = see(laid_out(turned, device), task, sharpness)
    return supervised_contrastive(vectors.float(), turned_classes, how.temperature, share.times(VIEWS))
