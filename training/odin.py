"""ODIN at evaluation, on any network: a temperature, and each image moved a little toward what a task takes it for.

s(x; tau)_j = softmax(f_k(x) / tau)_j and x~ = x - epsilon * sign(-grad_x log s(x; tau)_y) with y the largest output of
the task; what a task says of an image is s(x~; tau).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.network import Network
from training.tasks import to_device, to_unit

TEMPERATURES = (1.0, 10.0, 1000.0)
EPSILONS = (0.0, 0.001, 0.004, 0.016)
"""What is tried where neither is given; epsilon counts in a pixel's range from 0 to 1."""
BATCH = 256


class Odin(NamedTuple):
    """One temperature and one step for all tasks."""

    temperature: float
    epsilon: float

    def check(self) -> Odin:
        """Itself, or a ValueError."""
        if self.temperature <= 0 or self.epsilon < 0:
            raise ValueError(f"ODIN: got {self}; allowed: temperature above 0 and epsilon 0 or more, such as 10 0.001")
        return self


def tempered(network: Network, task: int, images: Tensor, temperature: float, scale: float) -> Tensor:
    """f / tau of a finished task, [n, classes]; `scale` is its correction's."""
    return network.logits(images, task) * (scale / temperature)


def toward(network: Network, task: int, images: Tensor, temperature: float, scale: float) -> Tensor:
    """sign(grad_x log s(x; tau)_y): the direction in which the task becomes surer of an image."""
    images = images.detach().clone().requires_grad_(True)
    with torch.enable_grad():
        surest = torch.log_softmax(tempered(network, task, images, temperature, scale), dim=1).amax(dim=1)
        (slope,) = torch.autograd.grad(surest.sum(), images)
    return torch.sign(slope)


@torch.no_grad()
def odin_logits(
    network: Network,
    pixels: NDArray[np.uint8],
    odin: Odin,
    device: torch.device,
    scales: Sequence[float] = (),
) -> dict[str, NDArray[Any]]:
    """f_k(x~) / tau of every task side by side, for uint8 images [n, height, width, channels].

    `scales` are the corrections' of the tasks; of the first ones only: what these said when there were no others.
    """
    grids = odin_grid(network, pixels, odin.temperature, (odin.epsilon,), device, scales)
    return {"logits": grids[0]}


def odin_logits_then(
    network: Network,
    pixels: NDArray[np.uint8],
    odin: Odin,
    device: torch.device,
    history: Sequence[Sequence[float]],
) -> dict[str, NDArray[Any]]:
    """The same with the scales after the last task, and beside them `logits_then` [n, classes, tasks]: after each.

    A scale changes the step as well, so those of an earlier time cannot be had from the last ones.
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
    """The same for several steps at one temperature: one array [n, classes] each, for one gradient of them all."""
    network.eval()
    every = to_device(pixels, device)
    columns: list[list[NDArray[Any]]] = [[] for _ in epsilons]
    for task in range(len(scales) or len(network.heads)):
        scale = scales[task] if scales else 1.0
        parts: list[list[Tensor]] = [[] for _ in epsilons]
        for part in every.split(BATCH):
            images = to_unit(part)
            direction = toward(network, task, images, temperature, scale)
            for place, epsilon in enumerate(epsilons):
                moved = images + epsilon * direction
                parts[place].append(tempered(network, task, moved, temperature, scale))
        for place, part_of_task in enumerate(parts):
            columns[place].append(torch.cat(part_of_task).cpu().numpy().astype(np.float64))
    return [np.concatenate(column, axis=1) for column in columns]
