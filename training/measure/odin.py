"""ODIN at evaluation: a temperature, and a small step of each image towards the class that a task predicts for it.

s(x; tau)_j = softmax(f_k(x) / tau)_j and x~ = x - epsilon * sign(-grad_x log s(x; tau)_y) with y the largest output of
the task; the score of a task for an image is s(x~; tau).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.network import Network
from training.data.tasks import to_device, to_unit

TEMPERATURES = (1.0, 10.0, 1000.0)
EPSILONS = (0.0, 0.001, 0.004, 0.016)
"""The grid that is searched if neither is given; epsilon is in units of a pixel's range from 0 to 1."""
BATCH = 256


@dataclass(frozen=True)
class Odin:
    """One temperature and one step size for all tasks."""

    temperature: float
    epsilon: float

    def __post_init__(self) -> None:
        if self.temperature <= 0 or self.epsilon < 0:
            raise ValueError(f"ODIN: got {self}; allowed: temperature above 0 and epsilon 0 or more, such as 10 0.001")


def tempered(network: Network, task: int, images: Tensor, temperature: float, scale: float) -> Tensor:
    """f / tau of a finished task, [n, classes]; `scale` is that of its correction."""
    return network.logits(images, task) * (scale / temperature)


def direction_of(network: Network, task: int, images: Tensor, temperature: float, scale: float) -> Tensor:
    """sign(grad_x log s(x; tau)_y): the direction that raises the confidence of the task."""
    images = images.detach().clone().requires_grad_(True)
    with torch.enable_grad():
        largest = torch.log_softmax(tempered(network, task, images, temperature, scale), dim=1).amax(dim=1)
        (slope,) = torch.autograd.grad(largest.sum(), images)
    return torch.sign(slope)


def odin_logits(
    network: Network, pixels: NDArray[np.uint8], odin: Odin, device: torch.device, scales: Sequence[float] = ()
) -> dict[str, NDArray[Any]]:
    """f_k(x~) / tau of every task side by side, for uint8 images [n, height, width, channels].

    `scales` are those of the corrections; with fewer than all tasks, only the first tasks are computed.
    """
    return {"logits": odin_grid(network, pixels, odin.temperature, (odin.epsilon,), device, scales)[0]}


def odin_logits_then(
    network: Network, pixels: NDArray[np.uint8], odin: Odin, device: torch.device, history: Sequence[Sequence[float]]
) -> dict[str, NDArray[Any]]:
    """The same with the scales after the last task, and `logits_then` [n, classes, tasks] with those after each task.

    A scale changes the step as well, so the logits after an earlier task cannot be derived from the last ones.
    """
    stages = [odin_logits(network, pixels, odin, device, scales)["logits"] for scales in history]
    classes = stages[-1].shape[1]
    padded = [np.pad(logits, ((0, 0), (0, classes - logits.shape[1]))) for logits in stages]
    return {"logits": stages[-1], "logits_then": np.stack(padded, axis=2)}


@torch.no_grad()
def odin_grid(
    network: Network,
    pixels: NDArray[np.uint8],
    temperature: float,
    epsilons: Sequence[float],
    device: torch.device,
    scales: Sequence[float] = (),
) -> list[NDArray[Any]]:
    """The same for several step sizes at one temperature: one array [n, classes] each, from a single gradient."""
    network.eval()
    every = to_device(pixels, device)
    columns: list[list[NDArray[Any]]] = [[] for _ in epsilons]
    for task in range(len(scales) or len(network.heads)):
        scale = scales[task] if scales else 1.0
        parts: list[list[Tensor]] = [[] for _ in epsilons]
        for images in map(to_unit, every.split(BATCH)):
            direction = direction_of(network, task, images, temperature, scale)
            for own, epsilon in zip(parts, epsilons, strict=True):
                own.append(tempered(network, task, images + epsilon * direction, temperature, scale))
        for column, own in zip(columns, parts, strict=True):
            column.append(torch.cat(own).cpu().numpy().astype(np.float64))
    return [np.concatenate(column, axis=1) for column in columns]
