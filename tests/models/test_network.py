from __future__ import annotations

import pytest
import torch

from models.config import NetworkConfig
from models.network import Network
from tests.helpers import random_images, tiny_config, tiny_network


def body_parameters(config: NetworkConfig) -> int:
    """How many numbers the body of a network with one task has."""
    network = Network(config)
    network.add_task(1)
    return sum(parameter.numel() for parameter in network.body.parameters())


def test_the_papers_digit_network_has_a_million_parameters() -> None:
    config = NetworkConfig(
        method="hat",
        backbone="convnet",
        height=28,
        width=28,
        channels=1,
        mean=0,
        std=1,
        base=64,
        hidden=800,
        norm=False,
        padded=False,
    )
    # conv 1-64 (3x3), 64-128 (3x3), 128-256 (2x2), then 256 * 2 * 2 - 800, all with biases.
    wanted = 64 * 10 + 128 * (64 * 9 + 1) + 256 * (128 * 4 + 1) + 800 * (1024 + 1)
    assert body_parameters(config) == wanted == 1_025_824


def test_the_papers_resnet_has_eleven_million_parameters() -> None:
    config = NetworkConfig(method="hat", backbone="resnet18", height=32, width=32, channels=3, mean=0, std=1, base=64)
    assert body_parameters(config) == pytest.approx(11.2e6, rel=0.005)


@pytest.mark.parametrize("backbone", ["convnet", "resnet18"])
@pytest.mark.parametrize("method", ["hat", "sup"])
def test_shapes_of_all_outputs_of_a_network(method: str, backbone: str) -> None:
    network = tiny_network(method, backbone)
    assert network.add_task(2) == 0
    assert network.add_task(3) == 1
    images = random_images(5, network.config.channels)
    features = network.connection.after.channels
    assert network.features(images, 1).shape == (5, features)
    assert network.rotated_features(images, 1).shape == (4, 5, features)
    vectors = network.project(images, 1, sharpness=1.0 if method == "hat" else None)
    assert vectors.shape == (5, 8)
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(5))
    assert [network.head(task).classes for task in range(2)] == [2, 3]


def test_step_one_may_change_nothing_of_another_tasks_own() -> None:
    network = tiny_network("hat")
    for _ in range(2):
        network.add_task(2)
    trainable = {id(parameter) for parameter in network.trainable(1)}
    own = {name for name, parameter in network.named_parameters() if id(parameter) in trainable}
    assert "masks.0.logits.1" in own
    assert "body.0.norm.norms.1.weight" in own
    assert "projection.outputs.1.weight" in own
    assert "body.0.conv.weight" in own
    assert not any(name.startswith("heads.") for name in own)
    assert not any(".logits.0" in name or ".norms.0" in name or ".outputs.0" in name for name in own)


def test_images_are_normalised_with_the_configured_mean_and_std() -> None:
    network = tiny_network("hat", norm=False, mean=0.5, std=0.25)
    plain = tiny_network("hat", norm=False, mean=0.0, std=1.0)
    for one in (network, plain):
        torch.manual_seed(1)
        one.add_task(2)
    images = random_images(3, 1)
    torch.testing.assert_close(network.features(images, 0), plain.features((images - 0.5) / 0.25, 0))


@pytest.mark.parametrize("backbone", ["convnet", "resnet18"])
@pytest.mark.parametrize("method", ["hat", "sup"])
def test_all_of_a_network_follows_it_to_its_device(method: str, backbone: str) -> None:
    network = tiny_network(method, backbone).to("meta")
    network.add_task(2)
    assert network.connection.before.used.is_meta
    assert all(tensor.is_meta for tensor in network.state_dict().values())
    for layer in network.task_layers():
        assert all(parameter.is_meta and entries.is_meta for parameter, entries in layer.frozen())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backbone": "vgg"}, "backbone is 'vgg'; allowed: convnet, resnet18"),
        ({"std": 0.0}, "std is 0.0; allowed: above 0"),
        ({"height": 4, "padded": False}, "is too small for 3 poolings"),
    ],
)
def test_an_impossible_network_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Network(tiny_config(**changes))
