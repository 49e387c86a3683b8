"""Step 1: learn a task's features without changing the outputs of earlier tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from models.config import ROTATIONS
from models.detectors.detector import is_uneven
from models.masks.all_reduce import processes, summed
from models.network import Network
from training.config import Augmentation, FeatureLearning
from training.data.tasks import TaskData
from training.host.device import Forward, channels_last_on_gpu, compiled, mixed_precision
from training.host.distributed import Share, independent_dropout, sum_gradients
from training.learn.augment import PAIR, rotated_views, standard_view
from training.learn.losses import supervised_contrastive
from training.learn.optimizers import set_lr, warmup_cosine


def batch_sizes(total: int, size: int, least: int = 1) -> list[int]:
    """The sizes of an epoch's batches; a last batch of fewer than `least` images is merged with the one before it."""
    sizes = [min(size, total - start) for start in range(0, total, size)]
    if len(sizes) > 1 and sizes[-1] < least:
        sizes[-2:] = [sizes[-2] + sizes[-1]]
    return sizes


def epoch_order(local_classes: Tensor) -> Tensor:
    """The images of one epoch in random order, as many as there are: each image once or, if the classes are uneven,
    equally many of each class. Then images of small classes are repeated, and others of large classes left out."""
    count = len(local_classes)
    classes, counts = local_classes.cpu().unique(return_counts=True)
    if not is_uneven(counts.tolist()):
        return torch.randperm(count)
    chosen = []
    for place, (local_class, available) in enumerate(zip(classes.tolist(), counts.tolist(), strict=True)):
        wanted = count * (place + 1) // len(classes) - count * place // len(classes)
        turns = [torch.randperm(available) for _ in range(-(-wanted // available))]
        chosen.append((local_classes.cpu() == local_class).nonzero().flatten()[torch.cat(turns)[:wanted]])
    return torch.cat(chosen)[torch.randperm(count)]


class Learnable(Protocol):
    """What is learned from: images as pixels (`training.data.tasks.Batchable`), or as encoded views."""

    @property
    def local_classes(self) -> Tensor: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def place(self) -> torch.device:
        """Where an index must be."""
        ...

    def __len__(self) -> int: ...
    def in_turn(self, indices: Iterable[Tensor]) -> Iterator[Tensor]: ...


BatchLoss = Callable[[Tensor, Tensor, Share, float, int], Tensor]
"""Images, classes, share, sharpness and the number of the batch -> this process's part of the loss of the batch."""


def batches(data: Learnable, size: int, least: int = 1) -> Iterator[tuple[Tensor, Tensor, Share]]:
    """One epoch in random order: images in [0, 1], classes, and the share of each batch that this process has."""
    parts = epoch_order(data.local_classes).split(batch_sizes(len(data), size, least))
    shares = [Share.of(len(part)) for part in parts]
    own = [part[share.rows].to(data.place) for part, share in zip(parts, shares, strict=True)]
    for images, index, share in zip(data.in_turn(own), own, shares, strict=True):
        yield images, data.local_classes[index], share


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
    """Yields the mean loss of each of the given epochs; an epoch is run when its loss is requested."""
    forward: Forward = network.project if how.loss == "csi" else network.features
    if compiling:
        forward = compiled(forward)

    def loss_of(images: Tensor, classes: Tensor, share: Share, sharpness: float, batch: int) -> Tensor:
        return _loss(network, forward, task, images, classes, share, how, views, sharpness, batch)

    yield from run_epochs(network, task, data.train, how, optimizer, epochs, loss_of)


def run_epochs(
    network: Network,
    task: int,
    train: Learnable,
    how: FeatureLearning,
    optimizer: torch.optim.Optimizer,
    epochs: range,
    loss_of: BatchLoss,
) -> Iterator[float]:
    """The steps of `learn_features`, with any loss of a batch; the mask mechanism takes part in each of them."""
    network.train()
    hooks = network.mechanism.step_hooks(task, how)
    trainable = network.trainable(task)
    # Small images may end as a single pixel, where a norm needs two images to have a variance. CSI has eight views.
    least = 2 if how.loss == "ce" else 1
    count = len(batch_sizes(len(train), how.batch_size, least))
    for epoch in epochs:
        # Summed on the device: reading the loss of every step would wait for the GPU every time.
        total = torch.zeros((), dtype=torch.float64, device=train.device)
        for batch, (images, classes, share) in enumerate(batches(train, how.batch_size, least)):
            progress = (epoch + (batch + 0.5) / count) / how.epochs
            set_lr(optimizer, how.lr * warmup_cosine(progress, how.warmup_epochs / how.epochs, how.warmup_start))
            # With one batch per epoch, the position advances over the epochs instead of over an epoch's batches.
            sharpness = hooks.begin_step(batch / (count - 1) if count > 1 else epoch / max(how.epochs - 1, 1))
            loss = loss_of(images, classes, share, sharpness, batch)
            total += loss.detach().double() * share.total
            if (regulariser := hooks.regulariser()) is not None:
                # Every process computes the whole term, so each contributes an equal part.
                loss = loss + regulariser / processes()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            sum_gradients(trainable)
            hooks.before_step()
            optimizer.step()
            hooks.after_step()
        yield summed(total).item() / len(train)


def _loss(
    network: Network,
    forward: Forward,
    task: int,
    images: Tensor,
    classes: Tensor,
    share: Share,
    how: FeatureLearning,
    views: Augmentation,
    sharpness: float,
    batch: int,
) -> Tensor:
    """This process's part of a batch's loss: CSI's contrastive loss over eight views of each image, or the head's
    cross-entropy on one view."""
    head, device = network.head(task), images.device
    if how.loss == "ce":
        seen = channels_last_on_gpu(standard_view(images, views, share), device)
        with mixed_precision(device), independent_dropout(max(network.config.dropout), batch):
            logits = head.all_logits(forward(seen, task, sharpness))
        return functional.cross_entropy(logits.float(), classes, reduction="sum") / share.total
    rotated, rotated_classes = rotated_views(images, classes, head.classes, views, PAIR, share)
    with mixed_precision(device), independent_dropout(max(network.config.dropout), batch):
        vectors = forward(channels_last_on_gpu(rotated, device), task, sharpness)
    return supervised_contrastive(vectors.float(), rotated_classes, how.temperature, share.times(PAIR * ROTATIONS))
