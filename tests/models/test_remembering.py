"""Learning a task changes no bit of the outputs of earlier tasks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from models.masks.hat import GatedLayer, UnitMask
from models.masks.step_hooks import Protection
from models.masks.supermask import MaskedLayer
from models.masks.task_layer import Connection, Selection
from models.network import Network
from tests.helpers import (
    FEATURES,
    MakeOptimizer,
    assert_same_tensors,
    learn_task,
    random_images,
    tiny_network,
    tiny_task,
)
from training.learn.optimizers import Lars

TASKS = 3
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=FEATURES.lr, weight_decay=0.1),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=FEATURES.lr, momentum=0.9, weight_decay=0.1),
    "lars": lambda parameters: Lars(parameters, lr=FEATURES.lr),
}
BACKBONES = {
    "convnet": {"backbone": "convnet", "norm": True},
    "convnet without norm": {"backbone": "convnet", "norm": False, "dropout": (0.1, 0.1, 0.2, 0.2)},
    "convnet with strides": {"backbone": "convnet", "base": 8, "hidden_norm": True, "pooled": False},
    "resnet18": {"backbone": "resnet18"},
}


@torch.no_grad()
def all_outputs(network: Network, images: Tensor) -> list[dict[str, Tensor]]:
    """The logits and all measurements of every task, and its memory."""
    network.eval()
    tasks = range(len(network.heads))
    return [{**network.measure(images, task), **_memories(network, task)} for task in tasks]


def _memories(network: Network, task: int) -> dict[str, Tensor]:
    detector = network.detector(task)
    return {name: value.clone() for name, value in detector.named_buffers()}


def shared_weights(network: Network) -> list[Tensor]:
    return [layer.weight.detach().clone() for layer in network.modules() if isinstance(layer, GatedLayer)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("method", ["hat", "sup"])
def test_old_outputs_are_bit_identical_after_every_new_task(method: str, backbone: str, optimizer: str) -> None:
    network = tiny_network(method, **BACKBONES[backbone])
    channels = network.config.channels
    images = random_images(6, channels, seed=99)
    remembered: list[dict[str, Tensor]] = []
    informative: list[bool] = []
    for number in range(TASKS):
        weights = shared_weights(network)
        learn_task(network, tiny_task(channels, seed=number), OPTIMIZERS[optimizer])
        outputs = all_outputs(network, images)
        for now, before in zip(outputs, remembered, strict=False):
            assert_same_tensors(now, before)
        # Not vacuous: outputs depend on the image, and learning a task changed the shared weights.
        # (In so small a network, a task may have no live unit left; then its outputs are the same for every image.)
        informative.append(any(outputs[number][name].std(dim=1).max() > 0 for name in ("logits", "shallow")))
        if method == "hat":
            changed = [not torch.equal(a, b) for a, b in zip(weights, shared_weights(network), strict=True)]
            # A tensor stays the same if finished tasks use all of it.
            assert sum(changed) > len(changed) / 2
        remembered = outputs
    assert sum(informative) >= TASKS - 1


def test_supermasks_of_different_tasks_differ() -> None:
    network = tiny_network("sup", "resnet18")
    for number in range(2):
        learn_task(network, tiny_task(3, seed=number))
    layers = [layer for layer in network.modules() if isinstance(layer, MaskedLayer)]
    assert layers
    assert not any(torch.equal(layer.mask(0), layer.mask(1)) for layer in layers)


@pytest.fixture
def protected() -> tuple[Protection, list[tuple[nn.Parameter, Tensor]]]:
    """A network with one task learned: its protection, and its shared parameters with what is frozen of them."""
    network = tiny_network("hat")
    learn_task(network, tiny_task(1))
    frozen = [pair for layer in network.task_layers() for pair in layer.frozen()]
    assert 0 < sum(int(mask.sum()) for _, mask in frozen) < sum(mask.numel() for _, mask in frozen)
    return Protection(network.task_layers()), frozen


def test_restore_puts_back_what_is_frozen_and_nothing_else(
    protected: tuple[Protection, list[tuple[nn.Parameter, Tensor]]],
) -> None:
    protection, frozen = protected
    before = [parameter.detach().clone() for parameter, _ in frozen]
    with torch.no_grad():
        for parameter, _ in frozen:
            parameter.add_(1)
    protection.after_step()
    for (parameter, mask), value in zip(frozen, before, strict=True):
        assert torch.equal(parameter, torch.where(mask, value, value + 1))


def test_steps_of_the_free_weights_in_a_nearly_full_layer_are_as_long_as_in_an_empty_one() -> None:
    """A trust ratio from the free weights' gradient alone would make them 70 times as long here."""
    before, after = (UnitMask(100, Selection()) for _ in range(2))
    layer = GatedLayer(Connection(before, after), bias=False)
    start = layer.weight.detach().clone()
    gradient = torch.randn(100, 100, generator=torch.Generator().manual_seed(0))
    steps = []
    for used in (0, 99):
        with torch.no_grad():
            layer.weight.copy_(start)
        for units in (before, after):
            units.used = torch.arange(100) < used
        protection, optimizer = Protection([layer]), Lars([layer.weight], lr=0.1)
        for _ in range(3):
            layer.weight.grad = gradient.clone()
            protection.before_step()
            optimizer.step()
            protection.after_step()
        steps.append(layer.weight.detach() - start)
    empty, full = steps
    free = torch.ones(100, 100, dtype=torch.bool)
    free[:99, :99] = False
    torch.testing.assert_close(full[free], empty[free], rtol=1e-3, atol=0)
    assert torch.equal(full[~free], torch.zeros(99 * 99))
