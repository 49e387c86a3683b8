"""Inference as the authors do it: the masked network in eager torch, one task and one rotation at a time."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.config import ROTATIONS
from models.masks.supermask import MaskedLayer
from models.network import Network
from training.data.tasks import to_device, to_unit


def prepare_masks(network: Network) -> None:
    """Make Sup's layers multiply signs and masks once, so that the baseline does not pay for our bit storage."""
    for layer in network.body.modules():
        if isinstance(layer, MaskedLayer):
            masked = [layer.live_weight(task) for task in range(len(network.heads))]
            layer.effective_weight = lambda layer=layer, masked=masked: masked[layer.selection.task]  # type: ignore[method-assign, misc]


@torch.no_grad()
def eager_logits(network: Network, pixels: NDArray[np.uint8]) -> Tensor:
    """[n, classes of all tasks]; no distances, because the authors have none."""
    images = to_unit(to_device(pixels, torch.device("cpu")))
    columns = []
    for task in range(len(network.heads)):
        head = network.head(task)
        scored = torch.zeros(len(images), head.classes)
        for turn in range(ROTATIONS):
            features = network.features(torch.rot90(images, turn, (2, 3)), task)
            scored += features @ head.weight[turn] + head.bias[turn]
        columns.append(scored / ROTATIONS * head.scale + head.shift)
    return torch.cat(columns, dim=1)
