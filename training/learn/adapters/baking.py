"""From a masked network to the small layers that a bundle stores for one finished task."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from models.backbones.adapter import BakedNorm
from models.network import Network
from serving.bundle.pooled.adapters import Adapter


@torch.no_grad()
def baked_adapter(network: Network, task: int) -> Adapter:
    """The layers of a finished task on its live units, with gates and norms folded in, and its head."""
    body = network.baked_body(task)
    (norm,) = (layer for layer in body.modules() if isinstance(layer, BakedNorm))
    layers = [
        (_array(layer.weight).reshape(layer.out_channels, -1), _array(layer.bias))
        for layer in body.modules()
        if isinstance(layer, nn.Conv2d) and layer.bias is not None
    ]
    inputs = _array(norm.factors), _array(norm.offsets)
    head = network.head(task).live_part(network.connection.after.live(task))
    return Adapter.of(inputs, layers, _array(head.weight), _array(head.bias)[:, 0], 1.0)


@torch.no_grad()
def network_logits(network: Network, task: int, encoded: NDArray[np.float32]) -> NDArray[np.float64]:
    """Logits [n, classes] of a finished task by the masked network itself, from vectors [n, rotations, dim]."""
    network.eval()
    count, rotations, dim = encoded.shape
    device = next(network.parameters()).device
    rows = torch.from_numpy(np.ascontiguousarray(encoded.transpose(1, 0, 2)).reshape(-1, dim, 1, 1)).to(device)
    features = network.features(rows, task).view(rotations, count, -1)
    head = network.head(task)
    each = torch.bmm(features, head.weight[:rotations]) + head.bias[:rotations]
    return _array(each.mean(dim=0)).astype(np.float64)


def _array(tensor: torch.Tensor) -> NDArray[np.float32]:
    array: NDArray[np.float32] = tensor.detach().cpu().numpy()
    return array
