"""Step 2 and what follows it: a task's head, its calibration, its class distances and its memory of scores."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from models.joint import summed
from models.network import Network, rotations
from serving.decision import TaskRule, scores_of_task
from training.augment import VIEWS, Augmentation, eight_views
from training.config import HeadLearning
from training.optimizers import set_lr, warmup_cosine
from training.representation import batches
from training.tasks import Batchable, TaskData, to_unit
from training.together import add_up_gradients

EVALUATION_BATCH = 256


def fit_head(
    network: Network,
    task: int,
    data: TaskData,
    how: HeadLearning,
    views: Augmentation,
    optimizer: torch.optim.Optimizer,
    epochs: range,
) -> Iterator[float]:
    """Train the linear head to tell classes and rotations apart, an epoch for each mean loss; the features stay."""
    network.eval()
    head = network.head(task)
    count = -(-len(data.train) // how.batch_size)
    for epoch in epochs:
        total = torch.zeros((), dtype=torch.float64, device=data.train.device)
        for batch, (images, classes, share) in enumerate(batches(data.train, how.batch_size)):
            set_lr(optimizer, how.lr * warmup_cosine((epoch + (batch + 0.5) / count) / how.epochs, 0))
            turned, turned_classes = eight_views(images, classes, data.classes, views, share)
            with torch.no_grad():
                features = network.features(turned, task)
            loss = functional.cross_entropy(head.all_logits(features), turned_classes, reduction="sum")
            loss = loss / (VIEWS * share.total)
            total += loss.detach().double() * share.total
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            add_up_gradients(head.parameters())
            optimizer.step()
        yield summed(total).item() / len(data.train)


@torch.no_grad()
def fit_distances(network: Network, task: int, data: Batchable) -> None:
    """Class means and covariances in the finished features, from the task's own training images."""
    live = network.wires.after.live(task)
    features = [network.rotated_features(data.images(index), task)[:, :, live] for index in _parts(data)]
    network.distance(task).fit(torch.cat(features, dim=1), data.local_classes)


@torch.no_grad()
def fit_ranges(network: Network, task: int, data: Batchable) -> None:
    """The extremes of every layer's activations on the task's own training images, in all four rotations."""
    body = network.baked_body(task).to(data.device)
    turned = (rotations(network.normalised(data.images(index))) for index in _parts(data))
    network.activation_ranges(task).record(body, turned)


@torch.no_grad()
def fit_calibration(network: Network, task: int, data: Batchable) -> None:
    """Scale and shift of the task's logits, from its own validation images: honest within the task, centred between.

    The scale makes softmax(scale * logits) as sure of itself as it is right (Platt's targets, which keep a head that
    errs on none of a few images from claiming certainty); the shift puts the mean largest logit at zero.
    """
    head = network.head(task)
    head.scale.fill_(1.0)
    head.shift.fill_(0.0)
    logits = torch.cat([network.outputs(data.images(index), task)[0] for index in _parts(data)]).double()
    head.scale.fill_(_temperature_scale(logits, data.local_classes))
    head.shift.fill_(-(logits.amax(dim=1) * head.scale).mean().item())


def _temperature_scale(logits: Tensor, local_classes: Tensor) -> float:
    """The scale in [0.01, 100] with the smallest cross-entropy on Platt's smoothed targets."""
    count, classes = logits.shape
    if classes == 1:
        return 1.0
    off = 1 / (count + classes)
    targets = torch.full_like(logits, off)
    targets.scatter_(1, local_classes[:, None], 1 - off * (classes - 1))
    scales = torch.logspace(-2, 2, 401, dtype=logits.dtype, device=logits.device)
    losses = torch.stack([-(targets * torch.log_softmax(scale * logits, dim=1)).sum() for scale in scales])
    return float(scales[losses.argmin()])


def fit_task_rule(network: Network, task: int, data: Batchable, score: str) -> TaskRule:
    """The scores of the task's own validation images, which its p-values are ranked among."""
    logits, distances = task_outputs(network, task, data.pixels)
    return TaskRule.fit(scores_of_task(score, logits, distances), network.head(task).classes)


@torch.no_grad()
def task_outputs(network: Network, task: int, pixels: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """A finished task's logits and distances for uint8 images [n, channels, height, width]."""
    network.eval()
    parts = [network.outputs(to_unit(part), task) for part in pixels.split(EVALUATION_BATCH)]
    logits, distances = (torch.cat(column).cpu().numpy() for column in zip(*parts, strict=True))
    return logits, distances


def _parts(data: Batchable) -> list[slice]:
    return [slice(start, start + EVALUATION_BATCH) for start in range(0, len(data), EVALUATION_BATCH)]
