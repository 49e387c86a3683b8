"""Baselines without learning, to compare a run with: the value of a method is its gain over them.

They are class-incremental, as a run is. A class is fitted once, in closed form, to its own training images only, and no
image is stored. All classes are compared in the same space, so the answer is the nearest class of all tasks. Known or
unknown is decided by the rule that is served: the rank of a task's smallest distance among those of its own held-out
images.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from serving.bundle.decision import NETWORK_NAMES, Rule, TaskRule, judge
from training.config import RunConfig
from training.data.images import Images
from training.data.sources import Sources
from training.data.tasks import task_split
from training.learn.folds import ENOUGH_VALIDATION, folds_of
from training.measure import metrics
from training.measure.evaluation import known_and_unknown

Array = NDArray[np.float32]
Projection = Callable[[Array], Array]
Distances = Callable[[Array, Array], Array]
"""(images of a class [m, numbers], images [n, numbers]) -> how far these are from the class [n]."""

FEW_NUMBERS, MOST_NUMBERS = 200, 1024
"""Images of more numbers than this are averaged over 2x2 pixels, again and again, until they have no more. With few, a
Gaussian needs no projection: neighbouring pixels of a large image are so alike that rounding errors decide."""
PROJECTED = 200
"""Random directions."""
PRINCIPAL = 100
"""Principal directions of the first task's images."""
SHRINKAGE = 0.1
"""The share of a sphere of the same total variance in every covariance."""
LEAST_VARIANCE = 1e-6
COMPONENTS, ENOUGH_IMAGES = 4, 250
"""A class has one Gaussian per ENOUGH_IMAGES images, up to COMPONENTS, as the detectors of a run have."""


class Baseline(NamedTuple):
    """What distances are measured in, and how."""

    name: str
    """On pixels."""
    most_numbers: int
    projection: Callable[[Array, int], Projection]
    """From the first task's images and the seed."""
    distances: Distances

    def title(self, *, encoded: bool) -> str:
        """Its name on pixels, or on vectors that a trunk has encoded."""
        return self.name.replace("pixels", "encoded vectors") if encoded else self.name


def evaluate_baselines(config: RunConfig, sources: Sources) -> Iterator[tuple[str, dict[str, Any]]]:
    """The name and the metrics of every baseline, on the images that a run of this configuration would have."""
    splits = [task_split(sources.of(config.lesson_of(task)), config, task) for task in range(len(config.tasks))]
    tests = known_and_unknown(sources.test_images()[0], config)
    class_ids = np.array([config.labels.index(str(label)) for label in tests[0].labels])
    for baseline in BASELINES:
        begun, most = time.monotonic(), baseline.most_numbers
        tasks = [TaskRows.of(*split, labels, most) for split, labels in zip(splits, config.tasks, strict=True)]
        known, unknown = (rows_of(images, most) for images in tests)
        project = baseline.projection(tasks[0].train, config.seed)
        seen = [task.projected(project) for task in tasks]
        places = np.cumsum([0, len(known), len(unknown)])
        tested = project(np.concatenate([known, unknown]))
        distances = np.concatenate([task.distances(baseline.distances, tested) for task in seen], axis=1)
        rules = tuple(task.rule(baseline.distances, config.seed) for task in seen)
        name = baseline.title(encoded=tests[0].encoded)
        rule = Rule(score=name, alpha=config.preset.alpha, tasks=rules, joint=True)
        verdicts = [
            judge(dict(zip(NETWORK_NAMES, (-part, part), strict=True)), rule)
            for part in (distances[start:stop] for start, stop in itertools.pairwise(places))
        ]
        yield name, _metrics(verdicts, class_ids, rule) | {"wall_seconds": time.monotonic() - begun}


def _metrics(verdicts: list[Any], class_ids: NDArray[np.integer[Any]], rule: Rule) -> dict[str, Any]:
    """The measures of RUN/metrics.json that do not need a network."""
    on_known, on_unknown = verdicts
    true_task = metrics.task_of(class_ids, rule)
    return {
        "til_accuracy": float(metrics.right_within_task(on_known, rule, class_ids).mean()),
        "cil_accuracy": float((on_known.class_id == class_ids).mean()),
        "tp_accuracy": float((on_known.task == true_task).mean()),
        "task_auroc": metrics.mean_of(metrics.task_auroc(on_known.task_unknown_score, true_task)),
        "accepted_known": float(on_known.known.mean()),
        "unknown": metrics.unknown_metrics(on_known, on_unknown, class_ids) if len(on_unknown.known) else None,
        "buffer": 0,
    }


class TaskRows(NamedTuple):
    """The images of one task as rows of numbers, with the classes within the task."""

    train: Array
    train_classes: NDArray[np.integer[Any]]
    validation: Array
    classes: int

    @classmethod
    def of(cls, train: Images, validation: Images, labels: tuple[str, ...], most: int) -> TaskRows:
        place = {label: local_class for local_class, label in enumerate(labels)}
        local = np.array([place[str(label)] for label in train.labels])
        return cls(rows_of(train, most), local, rows_of(validation, most), len(labels))

    def projected(self, project: Projection) -> TaskRows:
        return self._replace(train=project(self.train), validation=project(self.validation))

    def distances(self, measure: Distances, rows: Array) -> Array:
        """[n, classes] of the task."""
        own = (self.train[self.train_classes == local_class] for local_class in range(self.classes))
        return np.stack([measure(images, rows) for images in own], axis=1)

    def rule(self, measure: Distances, seed: int) -> TaskRule:
        """The scores of images that no class was fitted to: validation images and, if they are few, left-out ones."""
        scores = [self.distances(measure, self.validation).min(axis=1)]
        if len(self.validation) < ENOUGH_VALIDATION:
            torch.manual_seed(seed)
            fold = folds_of(torch.from_numpy(self.train_classes)).numpy()
            for number in range(fold.max() + 1):
                out = fold == number
                rest = self._replace(train=self.train[~out], train_classes=self.train_classes[~out])
                scores.append(rest.distances(measure, self.train[out]).min(axis=1))
        return TaskRule.fit(np.concatenate(scores), self.classes)


def rows_of(images: Images, most: int) -> Array:
    """Encoded vectors as they are; pixels in [0, 1], averaged down to a maximum number per image: [n, numbers]."""
    content = images.pixels
    if images.encoded:
        return np.asarray(content, dtype=np.float32)
    pixels = content.astype(np.float32) / 255
    while math.prod(pixels.shape[1:]) > most:
        count, height, width, channels = pixels.shape
        even = pixels[:, : height // 2 * 2, : width // 2 * 2]
        pixels = even.reshape(count, height // 2, 2, width // 2, 2, channels).mean(axis=(2, 4))
    return np.asarray(pixels.reshape(len(pixels), math.prod(pixels.shape[1:])), dtype=np.float32)


def from_mean(own: Array, rows: Array) -> Array:
    """The squared distance from the mean of the class."""
    squared: Array = np.square(rows - own.mean(axis=0)).sum(axis=1)
    return squared


def from_gaussians(own: Array, rows: Array) -> Array:
    """Twice the negative log-likelihood under the nearest of a few Gaussians."""
    nearest: Array = np.min([_from_gaussian(group, rows) for group in _groups(own)], axis=0)
    return nearest


def _from_gaussian(own: Array, rows: Array) -> Array:
    mean, count = own.mean(axis=0), own.shape[1]
    residuals = (own - mean).astype(np.float64)
    sphere = max(float(np.square(residuals).sum()) / len(own) / count, LEAST_VARIANCE)
    if len(own) < count:
        return _from_flat_gaussian(residuals, sphere, (rows - mean).astype(np.float64))
    covariance = residuals.T @ residuals / len(own)
    covariance = (1 - SHRINKAGE) * covariance + SHRINKAGE * sphere * np.eye(count)
    root = np.linalg.cholesky(covariance)
    white = (rows - mean) @ np.linalg.inv(root).T.astype(np.float32)
    distances: Array = np.square(white).sum(axis=1) + np.float32(2 * np.log(root.diagonal()).sum())
    return distances


def _from_flat_gaussian(residuals: NDArray[np.float64], sphere: float, rows: NDArray[np.float64]) -> Array:
    """The same for fewer images than numbers, for which the variance outside of a few directions is that of the sphere:
    it takes no matrix of the size of the covariance."""
    _, lengths, directions = np.linalg.svd(residuals, full_matrices=False)
    rest = SHRINKAGE * sphere
    variances = (1 - SHRINKAGE) * np.square(lengths) / len(residuals) + rest
    along = np.square(rows @ directions.T)
    squared = (np.square(rows).sum(axis=1) - along.sum(axis=1)) / rest + (along / variances).sum(axis=1)
    volume = np.log(variances).sum() + (rows.shape[1] - len(variances)) * np.log(rest)
    distances: Array = (squared + volume).astype(np.float32)
    return distances


def _groups(own: Array) -> list[Array]:
    """Groups of similar images of a class."""
    number = max(1, min(COMPONENTS, len(own) // ENOUGH_IMAGES))
    if number == 1:
        return [own]
    # Importing it takes two seconds.
    from sklearn.cluster import KMeans

    group = KMeans(number, n_init=1, random_state=0).fit_predict(own)
    return [own[group == place] for place in range(number)]


def _as_it_is(first: Array, seed: int) -> Projection:
    return lambda rows: rows


def _random_projection(first: Array, seed: int) -> Projection:
    """Random directions, drawn without looking at an image."""
    numbers = first.shape[1]
    directions = np.random.default_rng(seed).normal(size=(numbers, min(PROJECTED, numbers))) / np.sqrt(numbers)
    return lambda rows: rows @ directions.astype(np.float32)


def _first_principal(first: Array, seed: int) -> Projection:
    """The principal directions of the first task's images, which later tasks have to use as well."""
    mean = first.mean(axis=0)
    residuals = (first - mean).astype(np.float64)
    if len(first) < first.shape[1]:
        axes = np.linalg.svd(residuals, full_matrices=False)[2][::-1].T
    else:
        _, axes = np.linalg.eigh(residuals.T @ residuals)
    kept = axes[:, -PRINCIPAL:].astype(np.float32)
    return lambda rows: (rows - mean) @ kept


BASELINES = (
    Baseline("nearest mean", MOST_NUMBERS, _as_it_is, from_mean),
    Baseline("Gaussians on pixels", FEW_NUMBERS, _as_it_is, from_gaussians),
    Baseline("Gaussians, random projection", MOST_NUMBERS, _random_projection, from_gaussians),
    Baseline("Gaussians, PCA of the first task", MOST_NUMBERS, _first_principal, from_gaussians),
)
