"""The ONNX graph says what the network says, under names that a person can read, and keeps bits as bits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from onnx import numpy_helper
from torch import nn

from export.bake import bake
from export.graph import to_onnx
from export.verify import open_session, run_graph
from models.network import Network
from models.weight_mask import MaskedConv2d, MaskedLinear
from serving.bundle import ImageSpec
from tests.helpers import finish_with_random_statistics, open_gates, random_pixels, tiny_network

SPEC = {1: ImageSpec(height=8, width=8, mode="L"), 3: ImageSpec(height=8, width=8, mode="RGB")}
TASKS = 3


def network_of(method: str, backbone: str, **changes: Any) -> Network:
    """A network of three tasks, each with its own share of live channels."""
    network = tiny_network(method, backbone, **changes)
    for task, share in enumerate((0.3, 0.6, 1.0)[:TASKS]):
        network.add_task(2)
        open_gates(network, task, share)
        finish_with_random_statistics(network, task)
    return network


def graph_of(network: Network) -> onnx.ModelProto:
    return onnx.load_from_string(to_onnx(bake(network), SPEC[network.config.channels], {"name": "tiny"}))


def pixels_for(network: Network, count: int) -> NDArray[np.uint8]:
    pixels: NDArray[np.uint8] = random_pixels(count, network.config.channels).permute(0, 2, 3, 1).contiguous().numpy()
    return pixels


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("backbone", ["convnet", "resnet18"])
@pytest.mark.parametrize("method", ["hat", "sup"])
def test_graph_equals_baked_network(method: str, backbone: str, norm: bool, count: int) -> None:
    network = network_of(method, backbone, norm=norm)
    pixels = pixels_for(network, count)
    got = run_graph(open_session(graph_of(network).SerializeToString()), pixels)
    with torch.no_grad():
        wanted = dict(zip(("logits", "distances"), bake(network)(torch.from_numpy(pixels)), strict=True))
    for name, values in wanted.items():
        np.testing.assert_allclose(got[name], values.numpy(), rtol=2e-5, atol=2e-5)


def test_every_node_says_which_task_it_belongs_to() -> None:
    names = [node.name for node in graph_of(network_of("hat", "resnet18")).graph.node]
    assert len(set(names)) == len(names)
    rooms = {name.split("/")[0] for name in names}
    assert rooms == {"pixels", "task0", "task1", "task2", "logits", "distances"}
    assert "task1/body/2/first/Conv" in names


def test_writing_twice_gives_the_same_bytes() -> None:
    network = network_of("sup", "convnet")
    assert graph_of(network).SerializeToString() == graph_of(network).SerializeToString()


def test_signs_are_stored_once_and_masks_once_a_task_as_bits() -> None:
    network = network_of("sup", "resnet18")
    # The projection that only learning needs is not exported.
    layers = [
        module for part in network.body for module in part.modules() if isinstance(module, MaskedConv2d | MaskedLinear)
    ]
    stored = {constant.name: numpy_helper.to_array(constant) for constant in graph_of(network).graph.initializer}
    packed = {name: values for name, values in stored.items() if name.endswith("/packed")}
    assert sum("/signs/" in name for name in packed) == len(layers)
    assert sum("/mask/" in name for name in packed) == len(layers) * TASKS
    assert all(values.dtype == np.uint8 for values in packed.values())
    bits = sum(values.nbytes for values in packed.values())
    assert bits == sum(-(-math.prod(layer.shape) // 8) for layer in layers) * (1 + TASKS)
    assert not any(name.endswith("/weight") for name in stored if "/body/" in name)


def test_gates_leave_only_live_channels_in_the_graph() -> None:
    network = network_of("hat", "convnet")
    stored = {constant.name: numpy_helper.to_array(constant) for constant in graph_of(network).graph.initializer}
    first, second = network.unit_masks()[:2]
    for task in range(TASKS):
        assert stored[f"task{task}/body/1/0/weight"].shape[:2] == (len(second.live(task)), len(first.live(task)))


def test_a_layer_without_onnx_is_refused_by_name() -> None:
    baked = bake(network_of("hat", "convnet"))
    baked.baked_tasks[1].body.append(nn.Sigmoid())
    with pytest.raises(TypeError, match="task1/body/4: no ONNX is known for Sigmoid"):
        to_onnx(baked, SPEC[1], {})
