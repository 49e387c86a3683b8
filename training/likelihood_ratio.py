"""TPL's task prediction (Lin et al., 2024), for runs that keep images: likely in a task, and unlikely in all others.

    S_k(x) = log( exp(b_k max_j f_kj(x)) + exp(c_k / d_k(x) + n_k(x)) )

with task k's logits f_k, the squared distance d_k from the nearest of its classes, and the distance n_k from the images
of other tasks that are kept, to the fifth nearest of them, in the features that task k's network sees. b_k and c_k make
each term one on average for the task's own validation images.

It needs images of other tasks, and what it says of a task changes with every task that follows: so it is here to be
compared with, and no bundle has it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.distance import directions_of
from models.network import Network
from models.scores import TINY
from serving.decision import Outputs, Rule, Verdicts
from training.buffer import Buffer
from training.classifier import EVALUATION_BATCH
from training.task_prediction import normalised_power, verdicts_of, within_task
from training.tasks import to_device, to_unit

Array = NDArray[np.floating[Any]]

NEIGHBOURS = 5
TEMPERATURE = 0.05
"""Of the softmax that makes probabilities of the tasks' scores."""


@dataclass(frozen=True)
class RatioSays:
    """What every task says of images, and how near the kept images are to them."""

    network: Network
    kept: Buffer
    task_of_class: NDArray[np.integer[Any]]
    device: torch.device

    @torch.no_grad()
    def __call__(self, pixels: NDArray[np.uint8]) -> Outputs:
        """uint8 [n, height, width, channels] -> logits and distances [n, classes], and [n, classes, tasks, 5].

        The last are the distances from each task's nearest kept images, ascending and as the column's own task sees
        them: infinite where a task has fewer, and from its own.
        """
        self.network.eval()
        owners = torch.from_numpy(self.task_of_class)[self.kept.class_ids]
        images, columns = to_device(pixels, self.device), []
        for task in range(len(self.network.heads)):
            others = [
                _directions(self.network, self.kept.pixels[owners == other].to(self.device), task)
                if other != task
                else None
                for other in range(len(self.network.heads))
            ]
            parts = [self._said(part, task, others) for part in images.split(EVALUATION_BATCH)]
            columns.append([torch.cat(values).cpu().numpy() for values in zip(*parts, strict=True)])
        return dict(
            zip(("logits", "distances", "near"), (np.concatenate(c, axis=1) for c in zip(*columns, strict=True)),
                strict=True)
        )  # fmt: skip

    def _said(self, pixels: Tensor, task: int, others: list[Tensor | None]) -> tuple[Tensor, Tensor, Tensor]:
        depths = self.network.rotated_depths(to_unit(pixels), task)
        said = self.network.detector(task).together(self.network.said_of(depths, task))
        seen = directions_of(depths[-1])
        near = torch.stack([_nearest(seen, other) for other in others], dim=1)
        return said["logits"], said["tied"], near[:, None].expand(-1, said["logits"].shape[1], -1, -1)


def _directions(network: Network, pixels: Tensor, task: int) -> Tensor:
    """[rotations, n, live features] of length 1."""
    parts = [network.rotated_depths(to_unit(part), task)[-1] for part in pixels.split(EVALUATION_BATCH)]
    return directions_of(torch.cat(parts, dim=1))


def _nearest(seen: Tensor, other: Tensor | None) -> Tensor:
    """[n, 5], the mean distance over the rotations from the nearest of other images."""
    found = torch.full((seen.shape[1], NEIGHBOURS), torch.inf, device=seen.device)
    if other is not None and other.shape[1]:
        count = min(NEIGHBOURS, other.shape[1])
        found[:, :count] = torch.cdist(seen, other).mean(dim=0).topk(count, dim=1, largest=False).values
    return found


@dataclass(frozen=True)
class LikelihoodRatio:
    """A decision by TPL's scores, for the metrics of an evaluation; it stands where serving.decision.judge does."""

    logit_weights: Array
    distance_weights: Array
    memory: Array | None = None
    """The unknown scores of validation images, ascending, which p-values are ranked among."""

    @classmethod
    def fit(cls, network: Network) -> LikelihoodRatio:
        """The weights of every task, from what its network said of its own validation images."""
        memories = [network.detector(task).remembered() for task in range(len(network.heads))]
        largest = [float(memory["logits"].amax(dim=1).mean()) for memory in memories]
        nearness = [float(_inverse(memory["tied"].amin(dim=1)).mean()) for memory in memories]
        return cls(1 / np.maximum(np.abs(largest), TINY), 1 / np.asarray(nearness))

    def scores(self, outputs: Outputs, rule: Rule) -> Array:
        """S_k(x), [n, tasks]: higher is more likely."""
        count = len(rule.tasks)
        logits = np.maximum.reduceat(np.asarray(outputs["logits"], np.float64), rule.starts, axis=1)
        distances = np.minimum.reduceat(np.asarray(outputs["distances"], np.float64), rule.starts, axis=1)
        near = outputs["near"][:, rule.starts, :count].reshape(len(logits), count, -1)
        near = np.sort(near, axis=2)[:, :, :NEIGHBOURS]
        # Fewer than five may be kept: then the last of them; of none, as of one task alone, nothing is said.
        far = np.where(np.isfinite(near), near, -np.inf).max(axis=2)
        far = np.where(np.isfinite(far), far, 0.0)
        ratio = self.distance_weights[:count] / np.maximum(distances, TINY) + far
        scores: Array = np.logaddexp(self.logit_weights[:count] * logits, ratio)
        return scores

    def __call__(
        self, outputs: Outputs, rule: Rule, *, alpha: float | None = None, given_task: int | None = None
    ) -> Verdicts:
        logits: Array = np.asarray(outputs["logits"], dtype=np.float64)
        foreign = -self.scores(outputs, rule)
        within = within_task(logits, rule.task_of_class)
        p_task = normalised_power(-foreign, (TEMPERATURE,))
        level = rule.alpha if alpha is None else alpha
        return verdicts_of(logits, within, p_task, foreign, rule.task_of_class, self.memory, level, given_task)

    def remembering(self, outputs: Outputs, rule: Rule) -> LikelihoodRatio:
        """The same with the unknown scores of validation images in mind."""
        return replace(self, memory=np.sort(self(outputs, rule).unknown_score))


def _inverse(distances: Tensor) -> Tensor:
    return 1 / distances.clamp(min=TINY)
