"""Step 2 and what follows it: a task's head, its calibration, its detectors and its memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from models.joint import summed
from models.network import Network
from training.augment import VIEWS, Augmentation, eight_views
from training.config import HeadLearning
from training.optimizers import set_lr, tenfold_steps, warmup_cosine
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
            progress = (epoch + (batch + 0.5) / count) / how.epochs
            fall = tenfold_steps(progress, how.milestones) if how.milestones else warmup_cosine(progress, 0)
            set_lr(optimizer, how.lr * fall)
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
def fit_detectors(network: Network, task: int, data: TaskData) -> None:
    """What the task remembers: shapes of its classes from its training images, scores of its validation images."""
    seen = zip(*[network.rotated_depths(data.train.images(index), task) for index in _parts(data.train)], strict=True)
    depths = [torch.cat(parts, dim=1) for parts in seen]
    head = network.head(task)
    logits = head.live_part(network.wires.after.live(task)).each_rotation(depths[-1]).mean(dim=0)
    largest = float((logits * head.scale + head.shift).amax(dim=1).mean())
    network.detector(task).fit(depths, data.train.local_classes, largest)
    upright = data.validation.pixels
    said, of_turned = (task_said(network, task, pixels) for pixels in (upright, turned_away(upright)))
    network.detector(task).remember(said, of_turned)


@torch.no_grad()
def fit_ranges(network: Network, task: int, data: Batchable) -> None:
    """The extremes of every layer's activations on the task's own training images, in every rotation it sees."""
    body = network.baked_body(task).to(data.device)
    turned = (network.turned(network.normalised(data.images(index))) for index in _parts(data))
    network.activation_ranges(task).record(body, turned)


@torch.no_grad()
def fit_calibration(network: Network, task: int, data: Batchable) -> None:
    """Scale and shift of the task's logits, from its own validation images: honest within the task, centred between.

    The scale makes softmax(scale * logits) as sure of itself as it is right (Platt's targets, which keep a head that
    errs on none of a few images from claiming certainty); the shift puts the mean largest logit at zero.
    """
    head = network.head(task)
    seen = [network.rotated_features(data.images(index), task) for index in _parts(data)]
    logits = torch.cat([head.each_rotation(features).mean(dim=0) for features in seen]).double()
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


@torch.no_grad()
def task_said(network: Network, task: int, pixels: Tensor) -> dict[str, Tensor]:
    """A finished task's ingredients for uint8 images [n, channels, height, width], each [n, classes]."""
    network.eval()
    parts = [network.said(to_unit(part), task) for part in pixels.split(EVALUATION_BATCH)]
    return network.detector(task).together(
        {name: torch.cat([part[name] for part in parts], dim=1) for name in parts[0]}
    )


def turned_away(pixels: Tensor) -> Tensor:
    """Images [n, channels, height, width] by 90, 180 or 270 degrees, one after the other; oblong ones by 180."""
    turns = (1, 2, 3) if pixels.shape[2] == pixels.shape[3] else (2,)
    return torch.stack([torch.rot90(image, turns[place % len(turns)], (1, 2)) for place, image in enumerate(pixels)])


def _parts(data: Batchable) -> list[slice]:
    return [slice(start, start + EVALUATION_BATCH) for start in range(0, len(data), EVALUATION_BATCH)]
