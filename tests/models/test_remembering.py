"""The property that all the rest is for: learning a task changes no bit of what earlier tasks say."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from models.gated import GatedConv2d, GatedLinear
from models.network import Network
from models.weight_mask import MaskedConv2d, MaskedLinear
from tests.helpers import (
    FEATURES,
    MakeOptimizer,
    assert_same_tensors,
    learn_task,
    random_images,
    tiny_network,
    tiny_task,
)
from training.optimizers import Lars
from training.protection import Protection

TASKS = 3
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=FEATURES.lr, weight_decay=0.1),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=FEATURES.lr, momentum=0.9, weight_decay=0.1),
    "lars": lambda parameters: Lars(parameters, lr=FEATURES.lr),
}
BACKBONES = {
    "convnet": {"backbone": "convnet", "norm": True},
    "convnet without norm": {"backbone": "convnet", "norm": False, "dropout": 0.1},
    "convnet with strides": {"backbone": "convnet", "base": 8, "hidden_norm": True, "pooled": False},
    "resnet18": {"backbone": "resnet18"},
}


@torch.no_grad()
def all_said(network: Network, images: Tensor) -> list[dict[str, Tensor]]:
    """Every ingredient of every decision, and what the task remembers."""
    network.eval()
    tasks = range(len(network.heads))
    return [{**network.said(images, task), **_memories(network, task)} for task in tasks]


def _memories(network: Network, task: int) -> dict[str, Tensor]:
    detector = network.detector(task)
    return {"memory": detector.memory.clone(), "turned": detector.turned.clone()}


def shared_weights(network: Network) -> list[Tensor]:
    return [
        layer.weight.detach().clone() for layer in network.modules() if isinstance(layer, GatedConv2d | GatedLinear)
    ]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("method", ["hat", "sup"])
def test_old_outputs_are_bit_identical_after_every_new_task(method: str, backbone: str, optimizer: str) -> None:
    network = tiny_network(method, **BACKBONES[backbone])
    channels = network.config.channels
    images = random_images(6, channels, seed=99)
    remembered: list[dict[str, Tensor]] = []
    telling: list[bool] = []
    for number in range(TASKS):
        weights = shared_weights(network)
        learn_task(network, tiny_task(channels, seed=number), OPTIMIZERS[optimizer])
        said = all_said(network, images)
        for now, before in zip(said, remembered, strict=False):
            assert_same_tensors(now, before)
        # Not vacuous: answers depend on the image, and learning a task moved what all tasks share.
        # (So small a network may lose its last live unit to a task; then that task says the same of every image.)
        telling.append(any(said[number][name].std(dim=1).max() > 0 for name in ("logits", "shallow")))
        if method == "hat":
            changed = [not torch.equal(a, b) for a, b in zip(weights, shared_weights(network), strict=True)]
            # A tensor may stand still where finished tasks have taken all of it.
            assert sum(changed) > len(changed) / 2
        remembered = said
    assert sum(telling) >= TASKS - 1


def test_supermasks_of_different_tasks_differ() -> None:
    network = tiny_network("sup", "resnet18")
    for number in range(2):
        learn_task(network, tiny_task(3, seed=number))
    layers = [layer for layer in network.modules() if isinstance(layer, MaskedConv2d | MaskedLinear)]
    sparse = [layer for layer in layers if layer.density < 1]
    assert sparse
    assert not any(torch.equal(layer.mask(0), layer.mask(1)) for layer in sparse)


@pytest.fixture
def protected() -> tuple[Protection, list[tuple[nn.Parameter, Tensor]]]:
    """A network with one task learned: its protection, and its shared parameters with what is frozen of them."""
    network = tiny_network("hat")
    learn_task(network, tiny_task(1))
    frozen = [pair for layer in network.task_layers() for pair in layer.frozen()]
    assert 0 < sum(int(mask.sum()) for _, mask in frozen) < sum(mask.numel() for _, mask in frozen)
    return Protection(network), frozen


def test_restore_puts_back_what_is_frozen_and_nothing_else(
    protected: tuple[Protection, list[tuple[nn.Parameter, Tensor]]],
) -> None:
    protection, frozen = protected
    before = [parameter.detach().clone() for parameter, _ in frozen]
    with torch.no_grad():
        for parameter, _ in frozen:
            parameter.add_(1)
    protection.restore()
    for (parameter, mask), value in zip(frozen, before, strict=True):
        assert torch.equal(parameter, torch.where(mask, value, value + 1))


def test_masked_gradients_are_zero_where_frozen_and_untouched_elsewhere(
    protected: tuple[Protection, list[tuple[nn.Parameter, Tensor]]],
) -> None:
    protection, frozen = protected
    for parameter, _ in frozen:
        parameter.grad = torch.ones_like(parameter)
    protection.mask_gradients()
    for parameter, mask in frozen:
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, (~mask).float())
