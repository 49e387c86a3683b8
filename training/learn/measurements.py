"""The measurements of finished tasks, from which their unknown scores are computed."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.detectors.detector import mean_over_rotations
from models.network import Network
from training.data.tasks import to_device, to_unit

EVALUATION_BATCH = 256

Measurements = list[dict[str, Tensor]]
"""Every task's measurements of a batch: name -> [n, columns]."""


def all_measurements(network: Network, pixels: NDArray[np.uint8], device: torch.device) -> Measurements:
    """Every task's measurements of uint8 images [n, height, width, channels]."""
    images = to_device(pixels, device)
    return [task_measurements(network, task, images) for task in range(len(network.heads))]


@torch.no_grad()
def task_measurements(network: Network, task: int, pixels: Tensor) -> dict[str, Tensor]:
    """A finished task's measurements of uint8 images [n, channels, height, width]: name -> [n, columns]."""
    return mean_over_rotations(rotated_measurements(network, task, pixels))


@torch.no_grad()
def rotated_measurements(network: Network, task: int, pixels: Tensor) -> dict[str, Tensor]:
    """The same for each rotation: name -> [rotations, n, columns]."""
    network.eval()
    parts = [network.measure(to_unit(part), task) for part in pixels.split(EVALUATION_BATCH)]
    return {name: torch.cat([part[name] for part in parts], dim=1) for name in parts[0]}
