"""A baked sub-network has the outputs of the network with its masks, on the channels that the task uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn

from export.graph.baked_task import bake_task
from export.graph.session import run_graph, whole_session
from models.backbones.resnet import BakedResidualBlock
from models.baked import Align
from models.detectors.detector import mean_over_rotations
from models.masks.hat import GatedLayer
from models.network import Network
from serving.bundle.decision import NETWORK_NAMES, Outputs
from tests.export.networks import (
    baked_outputs,
    decider_for,
    finish_at_random,
    learn_at_random,
    pixels_for,
    written,
)
from tests.helpers import open_gates, tiny_network, unit_masks

BACKBONES = {
    "convnet": {"backbone": "convnet", "norm": True},
    "convnet without norm": {"backbone": "convnet", "norm": False},
    "convnet with strides": {"backbone": "convnet", "hidden_norm": True, "pooled": False},
    "convnet unpadded": {"backbone": "convnet", "height": 28, "width": 28, "padded": False},
    "convnet averaged": {"backbone": "convnet", "norm": False, "last_kernel": 3, "averaged": True},
    "resnet18": {"backbone": "resnet18"},
}


def network_of_shares(method: str, backbone: str, seed: int, *shares: float) -> Network:
    """A network with a task for each share of open units."""
    network = tiny_network(method, seed=seed, **BACKBONES[backbone])
    for share in shares:
        learn_at_random(network, 2 + len(network.heads), share, IMAGES)
    return network


IMAGES = 80
"""Images per task: enough for features that do not all point in the same direction."""
CLOSE = {"logits": 1e-5, "distances": 1e-4}
"""Allowed |difference| / max(1, |value|); distances count in spreads of a task's images, which may be small."""
CLOSE_IN_GRAPH = {"logits": 3e-5, "distances": 2e-4}
"""Tolerance for onnxruntime, which sums in another order."""


def assert_close(
    got: Sequence[Tensor | NDArray[np.floating]], expected: Outputs, allowed: Mapping[str, float] = CLOSE
) -> None:
    for name, values in zip(NETWORK_NAMES, got, strict=True):
        wanted = expected[name]
        # A logit is a sum of products that cancel, so its error scales with the largest product.
        size = max(1, np.abs(wanted).max()) if name == "logits" else np.maximum(1, np.abs(wanted))
        worst = float((np.abs(np.asarray(values) - wanted) / size).max())
        assert worst <= allowed[name], f"{name} differ by {worst:.2g} > {allowed[name]:g}"


@torch.no_grad()
def assert_baked_equals_network(network: Network, count: int = 3, graph: Path | None = None) -> None:
    """Also compares the graph, if a folder to write it to is given."""
    pixels = pixels_for(network, count)
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255
    decider = decider_for(network)
    means = [mean_over_rotations(network.measure(images, task)) for task in range(len(network.heads))]
    expected = decider.outputs(means)
    assert_close(baked_outputs(network, decider.scorers, pixels), expected)
    if graph is not None:
        got = run_graph(whole_session(written(graph, network), "fp32"), pixels)
        assert_close([got[name] for name in NETWORK_NAMES], expected, CLOSE_IN_GRAPH)


@pytest.mark.parametrize("backbone", BACKBONES)
def test_baked_equals_network_for_supermasks(backbone: str) -> None:
    assert_baked_equals_network(network_of_shares("sup", backbone, 0, 1.0, 1.0))


@pytest.mark.parametrize("backbone", BACKBONES)
def test_baked_equals_network_for_any_gates(backbone: str) -> None:
    @settings(derandomize=True, deadline=None, max_examples=4)
    @given(st.integers(0, 1000), st.floats(0, 1), st.floats(0, 1))
    # A share of zero leaves one live channel in every layer.
    @example(0, 0.0, 0.0)
    @example(1, 0.0, 1.0)
    @example(2, 1.0, 1.0)
    def check(seed: int, first: float, second: float) -> None:
        assert_baked_equals_network(network_of_shares("hat", backbone, seed, first, second))

    check()


@pytest.mark.parametrize("backbone", BACKBONES)
def test_the_graph_equals_the_network_for_any_gates(backbone: str) -> None:
    @settings(derandomize=True, deadline=None, max_examples=2)
    @given(st.integers(0, 1000), st.floats(0, 1), st.floats(0, 1))
    def check(seed: int, first: float, second: float) -> None:
        with TemporaryDirectory() as folder:
            assert_baked_equals_network(network_of_shares("hat", backbone, seed, first, second), graph=Path(folder))

    check()


@pytest.mark.parametrize("backbone", ["convnet", "resnet18"])
def test_baked_equals_network_with_one_live_channel_and_a_layer_that_two_tasks_share(backbone: str) -> None:
    # The last mask is the projection's, which is not baked.
    masks = len(unit_masks(tiny_network("hat", **BACKBONES[backbone]))) - 1

    @settings(derandomize=True, deadline=None, max_examples=4)
    @given(st.integers(0, 1000), st.floats(0.3, 1), st.floats(0.3, 1), *[st.integers(0, masks - 1)] * 2)
    def check(seed: int, first: float, second: float, narrow: int, shared: int) -> None:
        network = tiny_network("hat", seed=seed, **BACKBONES[backbone])
        for task, share in enumerate((first, second)):
            network.add_task(2)
            open_gates(network, task, share)
            if task == 0:
                shut_all_but(network, task, narrow, [seed % unit_masks(network)[narrow].channels])
            else:
                mask = unit_masks(network)[shared]
                mask.logits[1].data.copy_(mask.logits[0].data)
            finish_at_random(network, task, IMAGES)
        assert len(unit_masks(network)[narrow].live(0)) == 1
        assert torch.equal(unit_masks(network)[shared].live(0), unit_masks(network)[shared].live(1))
        assert_baked_equals_network(network)

    check()


def shut_all_but(network: Network, task: int, mask: int, units: list[int]) -> None:
    with torch.no_grad():
        unit_masks(network)[mask].logits[task].fill_(-1.0)
        unit_masks(network)[mask].logits[task][units] = 1.0


@pytest.mark.parametrize("backbone", ["convnet", "resnet18"])
def test_a_layer_with_one_live_channel(backbone: str) -> None:
    network = tiny_network("hat", **BACKBONES[backbone])
    network.add_task(2)
    open_gates(network, 0, 0.7)
    shut_all_but(network, 0, 1, [2])
    finish_at_random(network, 0, IMAGES)
    assert unit_masks(network)[1].live(0).tolist() == [2]
    assert_baked_equals_network(network)


@pytest.mark.parametrize("backbone", ["convnet", "resnet18"])
def test_two_tasks_that_share_every_unit(backbone: str) -> None:
    network = tiny_network("hat", **BACKBONES[backbone])
    for task in range(2):
        network.add_task(2)
        if task == 0:
            open_gates(network, 0, 0.5)
        else:
            for mask in unit_masks(network):
                mask.logits[1].data.copy_(mask.logits[0].data)
        finish_at_random(network, task, IMAGES)
    assert_baked_equals_network(network)


STEM, BLOCK_OUTPUT = 0, 1
"""Places of the masks before and after the first residual block, whose shortcut is the identity."""


@pytest.mark.parametrize(
    ("before", "after"),
    [([0, 1], [2, 3]), ([0, 3], [1, 2, 3]), ([0, 1, 2, 3], [2]), ([1], [0, 1, 2, 3]), ([1, 3], [1, 3])],
    ids=["disjoint", "overlapping", "narrowing", "widening", "equal"],
)
def test_live_channels_before_and_after_an_identity_shortcut(before: list[int], after: list[int]) -> None:
    network = tiny_network("hat", "resnet18")
    network.add_task(2)
    open_gates(network, 0, 0.7)
    shut_all_but(network, 0, STEM, before)
    shut_all_but(network, 0, BLOCK_OUTPUT, after)
    finish_at_random(network, 0, IMAGES)
    assert_baked_equals_network(network)
    block = bake_task(network, decider_for(network).scorers, 0).body[1]
    assert isinstance(block, BakedResidualBlock)
    assert isinstance(block.shortcut, Align)
    images = torch.randn(2, len(before), 4, 4)
    aligned = block.shortcut(images)
    for place, unit in enumerate(after):
        wanted = images[:, before.index(unit)] if unit in before else torch.zeros(2, 4, 4)
        assert torch.equal(aligned[:, place], wanted)


def shape_of(layer: nn.Conv2d | nn.Linear) -> tuple[int, int]:
    return layer.weight.shape[1], layer.weight.shape[0]


@pytest.mark.parametrize("backbone", BACKBONES)
def test_baked_layers_have_live_channels_and_no_others(backbone: str) -> None:
    network = network_of_shares("hat", backbone, 0, 0.5)
    layers = [layer for layer in network.body.modules() if isinstance(layer, GatedLayer)]
    baked = bake_task(network, decider_for(network).scorers, 0)
    plain = [layer for layer in baked.body.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    wanted = [
        (len(joined.before.live(0)) * joined.inputs_per_unit, len(joined.after.live(0)))
        for joined in (layer.connection for layer in layers)
    ]
    assert [shape_of(layer) for layer in plain] == wanted
    assert baked.head.weight.shape[1] == len(network.connection.after.live(0)) < network.connection.after.channels
    # Only convolutions and linear layers have parameters: norms are folded in.
    numbers = sum(parameter.numel() for parameter in baked.body.parameters())
    assert numbers == sum(parameter.numel() for layer in plain for parameter in layer.parameters())
    assert numbers < 0.6 * sum(parameter.numel() for parameter in network.body.parameters())


def test_baking_leaves_the_network_as_it_was() -> None:
    network = network_of_shares("hat", "resnet18", 0, 0.5)
    before: dict[str, Tensor] = {name: value.clone() for name, value in network.state_dict().items()}
    baked = bake_task(network, decider_for(network).scorers, 0)
    with torch.no_grad():
        for parameter in (*baked.body.parameters(), *baked.head.parameters()):
            parameter.zero_()
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
