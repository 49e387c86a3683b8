"""Continual learners on the encoded vectors of a frozen trunk, for `tests.benchmarks.photo_learners`.

Each learns one task after another from vectors [n, dim] of unit length and the numbers of their classes, and then
returns one score per class, of which the largest is the answer, and an unknown score per image.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from serving.bundle.decision import Rule, judge
from serving.bundle.pooled import (
    ChoiceMemory,
    EarlierTask,
    LearnedTask,
    Projection,
    Statistics,
    learn_task,
    projection_for,
)
from serving.bundle.pooled_model import PooledModel

Array = NDArray[np.floating[Any]]
Ids = NDArray[np.int64]
ALPHA = 0.05


class FeatureLearner(ABC):
    """A learner; `stored` counts the images, or vectors of images, that it keeps to go on learning."""

    name: str
    exemplar_free = True
    joint = False
    """Whether it must have the images of all tasks at once, so that it is a bound and no competitor."""

    def __init__(self, dim: int, seed: int) -> None:
        self.dim, self.seed = dim, seed
        self.classes = 0

    def learn(self, encoded: Array, class_ids: Ids) -> None:
        """Learn a task; its class ids follow those of the task before."""
        self.classes = int(class_ids.max()) + 1
        self.add(np.asarray(encoded, np.float64), class_ids)

    @abstractmethod
    def add(self, encoded: Array, class_ids: Ids) -> None: ...

    @abstractmethod
    def scores(self, encoded: Array) -> tuple[Array, Array]:
        """[n, classes] and [n] of vectors [n, dim]."""

    @property
    def stored(self) -> int:
        return 0

    @abstractmethod
    def bytes(self) -> int:
        """What it keeps to go on learning and to answer, numbers as float32."""


class NearestMean(FeatureLearner):
    """The class whose mean has the largest cosine with the vector."""

    name = "nearest class mean"

    def __init__(self, dim: int, seed: int) -> None:
        super().__init__(dim, seed)
        self.means = np.empty((0, dim))

    def add(self, encoded: Array, class_ids: Ids) -> None:
        own = [encoded[class_ids == each].mean(axis=0) for each in np.unique(class_ids)]
        self.means = np.concatenate([self.means, own])
        self.directions = unit(self.means).T

    def scores(self, encoded: Array) -> tuple[Array, Array]:
        cosines = unit(encoded) @ self.directions
        return cosines, -cosines.max(axis=1)

    def bytes(self) -> int:
        return 4 * self.means.size


class Slda(NearestMean):
    """Deep SLDA (Hayes and Kanan, 2020): running means, one running covariance, shrunk by 1e-4 towards the identity."""

    name = "SLDA"
    SHRINKAGE = 1e-4

    def __init__(self, dim: int, seed: int) -> None:
        super().__init__(dim, seed)
        self.scatter, self.images = np.zeros((dim, dim)), 0

    def add(self, encoded: Array, class_ids: Ids) -> None:
        super().add(encoded, class_ids)
        centred = encoded - self.means[class_ids]
        self.scatter += centred.T @ centred
        self.images += len(encoded)
        covariance = (1 - self.SHRINKAGE) * self.scatter / self.images + self.SHRINKAGE * np.eye(self.dim)
        self.weights = np.linalg.solve(covariance, self.means.T)
        self.bias = (self.means.T * self.weights).sum(axis=0) / 2

    def scores(self, encoded: Array) -> tuple[Array, Array]:
        outputs = encoded @ self.weights - self.bias
        return outputs, -outputs.max(axis=1)

    def bytes(self) -> int:
        return super().bytes() + 4 * self.scatter.size


class LdaPerTask(FeatureLearner):
    """Every task has its own means and covariance, shrunk by 0.3 towards its diagonal; the nearest class wins."""

    name = "LDA per task"
    SHRINKAGE = 0.3

    def __init__(self, dim: int, seed: int) -> None:
        super().__init__(dim, seed)
        self.tasks: list[tuple[Array, Array]] = []

    def add(self, encoded: Array, class_ids: Ids) -> None:
        local = class_ids - class_ids.min()
        means = np.stack([encoded[local == each].mean(axis=0) for each in range(local.max() + 1)])
        centred = encoded - means[local]
        covariance = centred.T @ centred / max(len(encoded) - len(means), 1)
        diagonal = np.diag(np.maximum(np.diag(covariance), 1e-3 * np.diag(covariance).mean()))
        shrunk = (1 - self.SHRINKAGE) * covariance + self.SHRINKAGE * diagonal
        root = np.linalg.cholesky(np.linalg.inv(shrunk))
        self.tasks.append((means @ root, root))

    def scores(self, encoded: Array) -> tuple[Array, Array]:
        distances = []
        for centers, root in self.tasks:
            images = encoded @ root
            squares = (images**2).sum(axis=1)[:, None] + (centers**2).sum(axis=1)
            distances.append(squares - 2 * images @ centers.T)
        every = np.concatenate(distances, axis=1)
        return -every, every.min(axis=1)

    def bytes(self) -> int:
        return 4 * sum(centers.size + root.size // 2 for centers, root in self.tasks)


class RanPac(FeatureLearner):
    """RanPAC (McDonnell et al., 2023) without its adaptation of the trunk: ReLU of a random projection, and ridge
    regression whose penalty is chosen at each task on a fifth of its images by the mean squared error.

    The projection has 5,000 numbers (10,000 in the paper).
    """

    name = "RanPAC"
    WIDTH = 5000
    PENALTIES = 10.0 ** np.arange(-3, 4)

    def __init__(self, dim: int, seed: int) -> None:
        super().__init__(dim, seed)
        generator = torch.Generator().manual_seed(seed)
        self.projection = torch.randn(dim, self.WIDTH, generator=generator, dtype=torch.float64)
        self.gram = torch.zeros(self.WIDTH, self.WIDTH, dtype=torch.float64)
        self.sums = torch.zeros(self.WIDTH, 0, dtype=torch.float64)
        self.weights = torch.zeros(self.WIDTH, 0, dtype=torch.float64)

    def expand(self, encoded: Array) -> torch.Tensor:
        return torch.relu(torch.from_numpy(np.asarray(encoded, np.float64)) @ self.projection)

    def add(self, encoded: Array, class_ids: Ids) -> None:
        phi = self.expand(encoded)
        target = torch.nn.functional.one_hot(torch.from_numpy(class_ids), self.classes).double()
        self.sums = torch.nn.functional.pad(self.sums, (0, self.classes - self.sums.shape[1]))
        order = np.random.default_rng(self.seed).permutation(len(phi))
        kept, judged = order[len(phi) // 5 :], order[: len(phi) // 5]
        gram, sums = self.gram + phi[kept].T @ phi[kept], self.sums + phi[kept].T @ target[kept]
        errors = [
            ((target[judged] - phi[judged] @ self.solved(gram, sums, each)) ** 2).mean() for each in self.PENALTIES
        ]
        penalty = float(self.PENALTIES[int(np.argmin(errors))])
        self.gram, self.sums = gram + phi[judged].T @ phi[judged], sums + phi[judged].T @ target[judged]
        self.weights = self.solved(self.gram, self.sums, penalty)

    def solved(self, gram: torch.Tensor, sums: torch.Tensor, penalty: float) -> torch.Tensor:
        regular = gram.clone()
        regular.diagonal().add_(penalty)
        return torch.cholesky_solve(sums, torch.linalg.cholesky(regular))

    def scores(self, encoded: Array) -> tuple[Array, Array]:
        outputs = (self.expand(encoded) @ self.weights).numpy()
        return outputs, -outputs.max(axis=1)

    def bytes(self) -> int:
        return 4 * (self.gram.numel() // 2 + self.sums.numel() + self.weights.numel() + self.projection.numel())


class NearestNeighbours(FeatureLearner):
    """The classes of the ten nearest stored vectors, weighted by their cosines. It stores the vector of every image."""

    name = "kNN, all vectors stored"
    exemplar_free = False
    NEIGHBOURS, SHARPNESS = 10, 20.0

    def __init__(self, dim: int, seed: int) -> None:
        super().__init__(dim, seed)
        self.encoded, self.class_ids = np.empty((0, dim), np.float32), np.empty(0, np.int64)

    def add(self, encoded: Array, class_ids: Ids) -> None:
        self.encoded = np.concatenate([self.encoded, unit(encoded).astype(np.float32)])
        self.class_ids = np.concatenate([self.class_ids, class_ids])

    def scores(self, encoded: Array) -> tuple[Array, Array]:
        votes, unknown = np.zeros((len(encoded), self.classes)), np.empty(len(encoded))
        for row, cosines in enumerate(unit(encoded).astype(np.float32) @ self.encoded.T):
            nearest = np.argsort(-cosines)[: self.NEIGHBOURS]
            np.add.at(votes[row], self.class_ids[nearest], np.exp(self.SHARPNESS * cosines[nearest]))
            unknown[row] = -cosines[nearest].mean()
        return votes, unknown

    @property
    def stored(self) -> int:
        return len(self.class_ids)

    def bytes(self) -> int:
        return 4 * self.encoded.size


class SequentialHead(FeatureLearner):
    """A linear head with softmax over all classes so far, fine-tuned on one task after another."""

    name = "head fine-tuned in sequence"
    EPOCHS, BATCH, RATE, DECAY = 60, 64, 0.01, 1e-4

    def __init__(self, dim: int, seed: int) -> None:
        super().__init__(dim, seed)
        self.weights, self.bias = torch.zeros(0, dim), torch.zeros(0)

    def add(self, encoded: Array, class_ids: Ids) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        new = self.classes - len(self.bias)
        weights = torch.cat([self.weights, torch.zeros(new, self.dim)]).requires_grad_()
        bias = torch.cat([self.bias, torch.zeros(new)]).requires_grad_()
        optimizer = torch.optim.AdamW([weights, bias], lr=self.RATE, weight_decay=self.DECAY)
        # Encoded vectors have length 1; features of variance 1 suit the step size.
        vectors, target = torch.from_numpy(encoded).float() * self.dim**0.5, torch.from_numpy(class_ids)
        steps = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.EPOCHS)
        for _ in range(self.EPOCHS):
            for part in torch.randperm(len(target), generator=generator).split(self.BATCH):
                loss = torch.nn.functional.cross_entropy(vectors[part] @ weights.T + bias, target[part])
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            steps.step()
        self.weights, self.bias = weights.detach(), bias.detach()

    def scores(self, encoded: Array) -> tuple[Array, Array]:
        vectors = torch.from_numpy(np.asarray(encoded, np.float32)) * self.dim**0.5
        logits = (vectors @ self.weights.T + self.bias).double()
        return logits.numpy(), -logits.logsumexp(dim=1).numpy()

    def bytes(self) -> int:
        return 4 * (self.weights.numel() + self.bias.numel())


class JointHead(SequentialHead):
    """The same head, fine-tuned on the images of all tasks so far together: it stores every image."""

    name = "head fine-tuned jointly"
    exemplar_free, joint = False, True

    def __init__(self, dim: int, seed: int) -> None:
        super().__init__(dim, seed)
        self.encoded, self.class_ids = np.empty((0, dim)), np.empty(0, np.int64)

    def add(self, encoded: Array, class_ids: Ids) -> None:
        self.encoded = np.concatenate([self.encoded, encoded])
        self.class_ids = np.concatenate([self.class_ids, class_ids])
        self.weights, self.bias = torch.zeros(0, self.dim), torch.zeros(0)
        super().add(self.encoded, self.class_ids)

    @property
    def stored(self) -> int:
        return len(self.class_ids)

    def bytes(self) -> int:
        return super().bytes() + 4 * self.encoded.size


class Ours(FeatureLearner):
    """What `openworld fit --quick` learns and a server answers by."""

    name = "openworld, statistics"

    def __init__(self, dim: int, seed: int, projection: Projection | None = None) -> None:
        super().__init__(dim, seed)
        self.projection = projection
        self.learned: LearnedTask | None = None
        self.tasks: tuple[EarlierTask, ...] = ()

    def add(self, encoded: Array, class_ids: Ids) -> None:
        if self.learned is None:
            per_class = len(class_ids) / len(np.unique(class_ids))
            projection = self.projection or projection_for(self.dim, per_class)
            statistics, memory = Statistics(projection), ChoiceMemory()
        else:
            statistics, memory = self.learned.statistics, self.learned.memory
        self.learned = learn_task(statistics, memory, encoded, class_ids, self.seed, self.tasks)
        self.tasks = (*self.tasks, self.learned.task)
        rules = tuple(each.rule for each in self.tasks)
        self.rule = Rule(score="pooled", alpha=ALPHA, tasks=rules, joint=True, expectation=True)
        self.model = PooledModel(self.learned.classifier, tuple(each.detector for each in self.tasks))

    def scores(self, encoded: Array) -> tuple[Array, Array]:
        verdicts = judge(self.model.outputs(encoded), self.rule)
        return verdicts.probability, verdicts.unknown_score

    def bytes(self) -> int:
        assert self.learned is not None
        kept = [self.learned.classifier, *(each.detector for each in self.tasks)]
        sums = self.learned.statistics.to_arrays()
        return sum(each.nbytes for part in kept for each in part.to_arrays().values()) + 4 * sums["gram"].size


LEARNERS: tuple[type[FeatureLearner], ...] = (
    NearestMean,
    Slda,
    LdaPerTask,
    RanPac,
    SequentialHead,
    Ours,
    NearestNeighbours,
    JointHead,
)


def unit(rows: Array) -> Array:
    scaled: Array = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return scaled
