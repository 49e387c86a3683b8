"""Step 2 and what follows it: a task's head, its calibration, its unknown detector and its activation ranges."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from models.config import ROTATIONS
from models.detectors import decisions
from models.detectors.detector import UnknownDetector, mean_over_rotations
from models.detectors.score import Features
from models.masks.all_reduce import summed
from models.network import Network
from serving.bundle.decision import Rule
from serving.bundle.own_scores import threshold
from training.config import Augmentation, HeadLearning
from training.data.tasks import Batchable, TaskData
from training.host.distributed import Share, sum_gradients
from training.learn.augment import rotated_views, slight_change
from training.learn.decisions import task_side
from training.learn.features import Learnable, batches
from training.learn.folds import ENOUGH_VALIDATION, folds_of
from training.learn.measurements import EVALUATION_BATCH, task_measurements
from training.learn.optimizers import set_lr, tenfold_steps, warmup_cosine
from training.learn.temperature import temperature_scale

COPIES, MANY_IMAGES = 4, 20_000
"""Slightly changed copies of each training image that detectors are fitted to: fewer if that makes MANY_IMAGES."""
STRENGTHS = (1.0, 1.5, 2.0)
"""How strongly copies may be changed: tried in this order until MOST_UNKNOWN is reached."""
MOST_UNKNOWN = 0.2
"""The share of slightly changed validation images that the chosen strength may leave to be called unknown."""
CHANGED_TIMES = 4
"""How often each validation image is changed to measure that share."""


def fit_head(
    network: Network,
    task: int,
    data: TaskData,
    how: HeadLearning,
    views: Augmentation,
    optimizer: torch.optim.Optimizer,
    epochs: range,
) -> Iterator[float]:
    """Yields the mean loss of each epoch in which the linear head learns classes and rotations; features are frozen."""

    def views_of(images: Tensor, classes: Tensor, share: Share) -> tuple[Tensor, Tensor]:
        return rotated_views(images, classes, data.classes, views, 1, share)

    yield from run_head_epochs(network, task, data.train, how, optimizer, epochs, views_of)


ViewsOf = Callable[[Tensor, Tensor, Share], tuple[Tensor, Tensor]]
"""Images, their classes and their share -> views of them and the classes of these."""


def run_head_epochs(
    network: Network,
    task: int,
    train: Learnable,
    how: HeadLearning,
    optimizer: torch.optim.Optimizer,
    epochs: range,
    views_of: ViewsOf,
) -> Iterator[float]:
    """The steps of `fit_head`, with any views of a batch: all rotations of each image."""
    network.eval()
    head = network.head(task)
    count = -(-len(train) // how.batch_size)
    for epoch in epochs:
        total = torch.zeros((), dtype=torch.float64, device=train.device)
        for batch, (images, classes, share) in enumerate(batches(train, how.batch_size)):
            progress = (epoch + (batch + 0.5) / count) / how.epochs
            fall = tenfold_steps(progress, how.milestones) if how.milestones else warmup_cosine(progress, 0)
            set_lr(optimizer, how.lr * fall)
            rotated, rotated_classes = views_of(images, classes, share)
            with torch.no_grad():
                features = network.features(rotated, task)
            loss = functional.cross_entropy(head.all_logits(features), rotated_classes, reduction="sum")
            loss = loss / (ROTATIONS * share.total)
            total += loss.detach().double() * share.total
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            sum_gradients(head.parameters())
            optimizer.step()
        yield summed(total).item() / len(train)


class Copies(NamedTuple):
    """The slightly changed copies of training images that a task's unknown scores were fitted to."""

    strength: float
    unknown: float
    """The share of slightly changed validation images that the task calls unknown all the same."""


@torch.no_grad()
def fit_detectors(
    network: Network,
    task: int,
    data: TaskData,
    views: Augmentation,
    alpha: float = 0.05,
    strengths: Sequence[float] = STRENGTHS,
) -> Copies:
    """Fit the task's unknown scores to its training images and slightly changed copies of them, and store measurements
    of images that they were not fitted to.

    A detector of unchanged images alone calls an image unknown that is moved by a pixel. The copies are changed as
    weakly as changed validation images allow: stronger ones could let unknown images pass. The stored measurements
    are of unchanged images: of changed ones, they certainly would. Strength 0 is without copies.
    """
    copies = max(1, min(COPIES, MANY_IMAGES // len(data.train))) if any(strengths) else 0
    # The copies of each strength take the place of those before: on many images, they are most of the memory.
    every = _room(network, task, data.train, 1 + copies)
    _write(network, task, data.train, every, 0, _unchanged)
    changed = _live_features(network, task, data.validation, [partial(slight_change, how=views)] * CHANGED_TIMES)
    for strength in strengths:
        change = partial(slight_change, how=views, strength=strength)
        for number in range(1, 1 + copies):
            _write(network, task, data.train, every, number, change)
        _fit_and_remember(network, task, data, every)
        unknown = _share_unknown(network, task, changed, alpha)
        if unknown <= MOST_UNKNOWN:
            break
    return Copies(strength, unknown)


def _fit_and_remember(network: Network, task: int, data: TaskData, every: Features) -> None:
    """Fit to features of training images and their copies, [rotations, images, 1 + copies, features]."""
    train, detector = data.train, network.detector(task)
    _fit_to(network, task, detector, every, train.local_classes)
    own = task_measurements(network, task, data.validation.pixels)
    left_out, of_left_out = dict[str, Tensor](), train.local_classes[:0]
    if len(data.validation) < ENOUGH_VALIDATION:
        left_out, of_left_out = _left_out(network, task, every, train.local_classes)
    detector.remember(own, left_out, torch.cat([data.validation.local_classes, of_left_out]))


def _share_unknown(network: Network, task: int, features: Features, alpha: float) -> float:
    """The share of images, given by features [rotations, images, copies, features], that the task alone would call
    unknown by the sum of its scores of features."""
    name = "features"
    scorer, rule = task_side(network, task, decisions()[name], alpha)
    flat = Features(*(depth.flatten(1, 2) for depth in features))
    scores = scorer.task_scores(mean_over_rotations(network.measure_features(flat, task))).cpu().numpy()
    alone = Rule(score=name, alpha=alpha, tasks=(rule,))
    return 0.0 if alone.blind_tasks() else float((alone.surprise(scores[:, None]) > threshold(alpha)).mean())


Change = Callable[[Tensor], Tensor]


def _unchanged(images: Tensor) -> Tensor:
    return images


def _live_features(network: Network, task: int, data: Batchable, changes: Sequence[Change] = (_unchanged,)) -> Features:
    """Live features of images after each of the changes, [rotations, images, changes, features]."""
    every = _room(network, task, data, len(changes))
    for number, change in enumerate(changes):
        _write(network, task, data, every, number, change)
    return every


def _room(network: Network, task: int, data: Batchable, changes: int) -> Features:
    """Room for the live features of images after so many changes, [rotations, images, changes, features]."""
    one = network.live_features(data.images(slice(1)), task)
    return Features(*(depth.new_empty(len(depth), len(data), changes, depth.shape[2]) for depth in one))


def _write(network: Network, task: int, data: Batchable, every: Features, number: int, change: Change) -> None:
    """Put the live features of changed images in their place, one batch at a time."""
    for index in _parts(data):
        for whole, part in zip(every, network.live_features(change(data.images(index)), task), strict=True):
            whole[:, index, number] = part


def _fit_to(network: Network, task: int, detector: UnknownDetector, every: Features, local_classes: Tensor) -> None:
    """Fit to features [rotations, images, 1 + copies, features]."""
    head, copies = network.head(task), every.deep.shape[2]
    features = Features(*(depth.flatten(1, 2) for depth in every))
    logits = head.live_part(network.connection.after.live(task)).each_rotation(features.deep).mean(dim=0)
    unchanged = torch.arange(copies, device=local_classes.device).repeat(len(local_classes)) == 0
    detector.fit(features, local_classes.repeat_interleave(copies), logits * head.scale + head.shift, unchanged)


def _left_out(network: Network, task: int, every: Features, local_classes: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Measurements [images, columns] of training images by detectors that were fitted to the other folds, and their
    classes: of all images but the only ones of their class."""
    fold = folds_of(local_classes)
    live = network.head(task).live_part(network.connection.after.live(task))
    found: dict[str, Tensor] = {}
    for number in range(int(fold.max()) + 1):
        out = fold == number
        part = copy.deepcopy(network.detector(task))
        _fit_to(network, task, part, Features(*(depth[:, ~out] for depth in every)), local_classes[~out])
        plain = Features(*(depth[:, out, 0] for depth in every))
        means = mean_over_rotations({"logits": live.each_rotation(plain.deep), **part.measure(plain)})
        for name, values in means.items():
            found.setdefault(name, values.new_empty(len(fold), values.shape[1]))[out] = values
    scored = fold >= 0
    return {name: values[scored] for name, values in found.items()}, local_classes[scored]


@torch.no_grad()
def fit_ranges(network: Network, task: int, data: Batchable) -> None:
    """Record the range of every layer's activations on the task's training images, in every rotation."""
    body = network.baked_body(task).to(data.device)
    encoded = (network.encode(network.rotated(data.images(index))) for index in _parts(data))
    network.activation_ranges(task).record(body, encoded)


@torch.no_grad()
def fit_calibration(network: Network, task: int, data: Batchable) -> None:
    """Fit the scale and shift of the task's logits to its validation images.

    The scale calibrates softmax(scale * logits) within the task. Platt's targets keep a head that makes no mistake on
    a few images from claiming certainty. The shift moves the mean largest logit to zero, so that tasks are comparable.
    """
    head = network.head(task)
    seen = [network.rotated_features(data.images(index), task) for index in _parts(data)]
    logits = torch.cat([head.each_rotation(features).mean(dim=0) for features in seen]).double()
    head.scale.fill_(temperature_scale(logits, data.local_classes))
    head.shift.fill_(-(logits.amax(dim=1) * head.scale).mean().item())


def _parts(data: Batchable) -> list[slice]:
    return [slice(start, start + EVALUATION_BATCH) for start in range(0, len(data), EVALUATION_BATCH)]
