"""TPL's task prediction (Lin et al., 2024), for runs that store images: the likelihood ratio of a task to all others.

    S_k(x) = log( exp(b_k max_j f_kj(x)) + exp(c_k / d_k(x) + n_k(x)) )

with task k's logits f_k, the squared distance d_k from the nearest of its classes, and the distance n_k to the
fifth nearest of the stored images of other tasks, in the features of task k's network. b_k and c_k make each term one
on average for the validation images of the task.

TPL needs images of other tasks, and the score of a task changes with every later task. So it serves as a comparison and
is never exported.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.detectors.detector import mean_over_rotations
from models.detectors.mahalanobis import TINY
from models.detectors.score import directions_of
from models.network import Network
from serving.bundle.decision import Outputs, Rule, Verdicts
from training.data.tasks import to_device, to_unit
from training.learn.buffer import Buffer
from training.learn.measurements import EVALUATION_BATCH
from training.measure.task_prediction import normalised_power, verdicts_of, within_task

Array = NDArray[np.floating[Any]]

NEIGHBOURS = 5
TEMPERATURE = 0.05
"""The temperature of the softmax over the scores of the tasks."""


@dataclass(frozen=True)
class LikelihoodRatioOutputs:
    """Computes what TPL needs: the outputs of every task, and the distances to the stored images."""

    network: Network
    stored: Buffer
    task_of_class: NDArray[np.integer[Any]]
    device: torch.device

    @torch.no_grad()
    def __call__(self, pixels: NDArray[np.uint8]) -> Outputs:
        """uint8 [n, height, width, channels] -> logits and distances [n, classes], and [n, classes, tasks, 5].

        The last are the distances to the nearest stored images of each task, ascending, in the features of the task of
        the column; infinite if a task has fewer images, and for the task itself.
        """
        self.network.eval()
        owners = torch.from_numpy(self.task_of_class)[self.stored.class_ids]
        images, columns = to_device(pixels, self.device), []
        for task in range(len(self.network.heads)):
            others = [
                _directions(self.network, self.stored.pixels[owners == other].to(self.device), task)
                if other != task
                else None
                for other in range(len(self.network.heads))
            ]
            parts = [self._outputs(part, task, others) for part in images.split(EVALUATION_BATCH)]
            columns.append([torch.cat(values).cpu().numpy() for values in zip(*parts, strict=True)])
        return dict(
            zip(("logits", "distances", "near"), (np.concatenate(c, axis=1) for c in zip(*columns, strict=True)),
                strict=True)
        )  # fmt: skip

    def _outputs(self, pixels: Tensor, task: int, others: list[Tensor | None]) -> tuple[Tensor, Tensor, Tensor]:
        features = self.network.live_features(to_unit(pixels), task)
        means = mean_over_rotations(self.network.measure_features(features, task))
        seen = directions_of(features.deep)
        near = torch.stack([_nearest(seen, other) for other in others], dim=1)
        return means["logits"], means["mahalanobis"], near[:, None].expand(-1, means["logits"].shape[1], -1, -1)


def _directions(network: Network, pixels: Tensor, task: int) -> Tensor:
    """[rotations, n, live features] of length 1."""
    parts = [network.live_features(to_unit(part), task).deep for part in pixels.split(EVALUATION_BATCH)]
    return directions_of(torch.cat(parts, dim=1))


def _nearest(seen: Tensor, other: Tensor | None) -> Tensor:
    """[n, 5]: distances to the nearest of other images, averaged over the rotations."""
    found = torch.full((seen.shape[1], NEIGHBOURS), torch.inf, device=seen.device)
    if other is not None and other.shape[1]:
        count = min(NEIGHBOURS, other.shape[1])
        found[:, :count] = torch.cdist(seen, other).mean(dim=0).topk(count, dim=1, largest=False).values
    return found


@dataclass(frozen=True)
class LikelihoodRatio:
    """Decides by TPL's scores; it is called as the served rule, `judge`, is."""

    logit_weights: Array
    distance_weights: Array
    memory: Array | None = None
    """The unknown scores of validation images, ascending; p-values are ranks among them."""

    @classmethod
    def fit(cls, network: Network) -> LikelihoodRatio:
        """The weights of every task, from the outputs that it remembers of its own validation images."""
        memories = [network.detector(task).own.means() for task in range(len(network.heads))]
        largest = [float(memory["logits"].amax(dim=1).mean()) for memory in memories]
        distances = [memory["mahalanobis"].amin(dim=1) for memory in memories]
        nearness = [float((1 / own.clamp(min=TINY)).mean()) for own in distances]
        return cls(1 / np.maximum(np.abs(largest), TINY), 1 / np.asarray(nearness))

    def scores(self, outputs: Outputs, rule: Rule) -> Array:
        """S_k(x), [n, tasks]: higher means more likely of the task."""
        count = len(rule.tasks)
        logits = np.maximum.reduceat(np.asarray(outputs["logits"], np.float64), rule.starts, axis=1)
        distances = np.minimum.reduceat(np.asarray(outputs["distances"], np.float64), rule.starts, axis=1)
        near = outputs["near"][:, rule.starts, :count].reshape(len(logits), count, -1)
        near = np.sort(near, axis=2)[:, :, :NEIGHBOURS]
        # With fewer than five stored images, the farthest of them counts; with none, as after one task, the term is 0.
        far = np.where(np.isfinite(near), near, -np.inf).max(axis=2)
        far = np.where(np.isfinite(far), far, 0.0)
        ratio = self.distance_weights[:count] / np.maximum(distances, TINY) + far
        return np.asarray(np.logaddexp(self.logit_weights[:count] * logits, ratio))

    def __call__(self, outputs: Outputs, rule: Rule) -> Verdicts:
        logits: Array = np.asarray(outputs["logits"], dtype=np.float64)
        foreign = -self.scores(outputs, rule)
        within = within_task(logits, rule.task_of_class)
        p_task = normalised_power(-foreign, (TEMPERATURE,))
        return verdicts_of(logits, within, p_task, foreign, rule, self.memory)

    def with_memory(self, outputs: Outputs, rule: Rule) -> LikelihoodRatio:
        """This rule with the unknown scores of these validation outputs as memory."""
        return replace(self, memory=np.sort(self(outputs, rule).unknown_score))
