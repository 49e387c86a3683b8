"""The two steps of learning an adapter: CSI on encoded views, or cross-entropy."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from models.backbones.adapter import AdapterStage, InputNorm
from models.network import Network
from training.config import FeatureLearning, HeadLearning
from training.host.distributed import Share
from training.learn.adapters.views import AdapterData
from training.learn.augment import PAIR
from training.learn.features import run_epochs
from training.learn.head import run_head_epochs
from training.learn.losses import supervised_contrastive


def learn_features(
    network: Network,
    task: int,
    data: AdapterData,
    how: FeatureLearning,
    optimizer: torch.optim.Optimizer,
    epochs: range,
) -> Iterator[float]:
    """Yields the mean loss of each epoch of step 1: CSI's contrastive loss over two views in four rotations each, or
    the head's cross-entropy on one upright view."""

    def loss_of(views: Tensor, classes: Tensor, share: Share, sharpness: float, batch: int) -> Tensor:
        rows, rotated_classes = as_rows(views, classes, data.classes)
        if how.loss == "ce":
            logits = network.head(task).all_logits(network.features(rows, task, sharpness))
            return functional.cross_entropy(logits, rotated_classes)
        return supervised_contrastive(network.project(rows, task, sharpness), rotated_classes, how.temperature)

    train = data.train(PAIR if how.loss == "csi" else 1)
    yield from run_epochs(network, task, train, how, optimizer, epochs, loss_of)


def learn_head(
    network: Network, task: int, data: AdapterData, how: HeadLearning, optimizer: torch.optim.Optimizer, epochs: range
) -> Iterator[float]:
    """Yields the mean loss of each epoch of step 2: a linear head of classes and rotations on frozen features."""

    def rows_of(views: Tensor, classes: Tensor, share: Share) -> tuple[Tensor, Tensor]:
        return as_rows(views, classes, data.classes)

    yield from run_head_epochs(network, task, data.train(1), how, optimizer, epochs, rows_of)


@torch.no_grad()
def settle_norms(network: Network, task: int, data: AdapterData) -> None:
    """Replace the running statistics of the task's norms by those of all its views, once its gates are fixed.

    Running ones lag behind: they are of soft gates, and a few steps do not forget what they began with.
    """
    network.eval()
    selection = network.mechanism.selection
    selection.task, selection.sharpness = task, None
    rows, _ = as_rows(data.vectors, data.local_classes, data.classes)
    maps = network.encode(rows.to(data.local_classes.device))
    for stage in network.body:
        if isinstance(stage, InputNorm | AdapterStage):
            norm = stage.norm.of(task)
            assert norm.running_mean is not None
            assert norm.running_var is not None
            sums = stage.linear(maps) if isinstance(stage, AdapterStage) else maps
            variance, mean = torch.var_mean(sums, dim=(0, 2, 3))
            norm.running_mean.copy_(mean)
            norm.running_var.copy_(variance)
        maps = stage(maps)


def as_rows(views: Tensor, classes: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """[n, views, rotations, dim] and classes [n] -> images of one pixel [n * views * rotations, dim, 1, 1] and their
    classes, where every rotation of a class is a separate class."""
    _, drawn, rotations, dim = views.shape
    turns = torch.arange(rotations, device=classes.device) * count
    rotated = classes[:, None, None] + turns.expand(len(classes), drawn, rotations)
    return views.reshape(-1, dim, 1, 1), rotated.flatten()
