"""The paper's table of parameters, for the networks of its presets; large ones are only described (device `meta`)."""

from __future__ import annotations

import pytest
import torch

from models.heads import RotationHead
from models.network import Network
from models.parameter_counts import capacity_used, count_parameters
from tests.helpers import learn_task, tiny_network, tiny_task
from training.presets import choose_preset

CLASSES = {
    "mnist-5t": 10,
    "cifar10-5t": 10,
    "cifar100-10t": 100,
    "cifar100-20t": 100,
    "tinyimagenet-5t": 200,
    "tinyimagenet-10t": 200,
}
HAT = dict(zip(CLASSES, (1.04, 11.23, 45.01, 45.28, 44.97, 45.11), strict=True))
HAT_CSI = dict(zip(CLASSES, (1.07, 11.25, 45.31, 45.58, 45.59, 45.72), strict=True))
HAT_CSI_TASK = dict(zip(CLASSES, (7.7, 17.6, 68.0, 47.5, 191.0, 109.0), strict=True))
SUP_CSI_TASK = dict(zip(CLASSES, (56.3, 284.9, 590.3, 580.0, 607.7, 605.1), strict=True))
"""The paper's numbers: parameters in millions, and per task in thousands."""


def network_of(name: str, method: str, loss: str = "csi") -> Network:
    """A preset's network with all its tasks."""
    preset = choose_preset(name, method, loss)
    with torch.device("cpu" if preset.network.backbone == "convnet" else "meta"):
        network = Network(preset.network)
        for _ in range(CLASSES[name] // preset.classes_per_task):
            network.add_task(preset.classes_per_task)
    return network


@pytest.mark.parametrize("name", HAT_CSI)
def test_hat_with_csi_has_the_papers_numbers(name: str) -> None:
    counts = count_parameters(network_of(name, "hat"))
    assert counts["per_task"][0] / 1e3 == pytest.approx(HAT_CSI_TASK[name], abs=0.06)
    assert counts["inference"] / 1e6 == pytest.approx(HAT_CSI[name], abs=0.005)
    assert counts["inference"] == counts["shared"] + sum(counts["per_task"])


def test_hat_on_mnist_has_the_parameters_of_the_authors_network() -> None:
    counts = count_parameters(network_of("mnist-5t", "hat"))
    # 3 -> 64 3x3, 64 -> 128 3x3, 128 -> 256 2x2 and 1024 -> 800 with biases; per task 1,248 gates and a head of 6,408.
    assert counts["shared"] == 1_792 + 73_856 + 131_328 + 820_000
    assert counts["per_task"] == [7_656] * 5
    assert counts["inference"] == 1_065_256


def test_sup_on_mnist_keeps_the_weights_of_the_authors_network() -> None:
    network = network_of("mnist-5t", "sup")
    kept = [layer.task_numbers() for layer in network.mechanism.layers]
    # 3 -> 64, 64 -> 128 and 128 -> 256, all 3x3, then 256 -> 800; the last layer is the projection's.
    assert kept[:4] == [864, 6_144, 12_288, 33_792]
    images = torch.rand(2, 3, 28, 28)
    assert network.body(network.encode(images)).shape == (2, 800)


@pytest.mark.parametrize("name", HAT)
def test_hat_with_cross_entropy_has_the_papers_numbers(name: str) -> None:
    assert count_parameters(network_of(name, "hat", "ce"))["inference"] / 1e6 == pytest.approx(HAT[name], abs=0.005)


@pytest.mark.parametrize("name", SUP_CSI_TASK)
def test_sup_keeps_as_many_weights_as_the_paper_reports(name: str) -> None:
    """The paper's head is masked too, to half of it or to 32 weights per unit; ours trains all of its weights."""
    network = network_of(name, "sup")
    head = network.head(0)
    inputs, outputs = head.weight.shape[1], head.weight.shape[0] * head.classes
    masked = min(inputs * outputs // 2, 32 * (inputs + outputs))
    own = sum(values.numel() for values in head.parameters())
    counts = count_parameters(network)
    if name == "mnist-5t":
        assert counts["per_task"][0] - own + masked == 56_288
    assert (counts["per_task"][0] - own + masked) / 1e3 == pytest.approx(SUP_CSI_TASK[name], abs=0.06)
    assert counts["shared"] == 0
    assert capacity_used(network) is None


def test_a_correction_is_two_numbers_per_task() -> None:
    network = tiny_network("hat")
    for number in range(2):
        learn_task(network, tiny_task(1, seed=number))
    plain, corrected = (count_parameters(network, corrected=flag) for flag in (False, True))
    assert corrected["inference"] - plain["inference"] == 4
    assert all(count > 0 for count in plain["detectors_per_task"])


def test_capacity_is_the_share_of_taken_weights() -> None:
    network = tiny_network("hat")
    assert capacity_used(network) == 0
    used = []
    for number in range(2):
        learn_task(network, tiny_task(1, seed=number))
        used.append(capacity_used(network))
    assert used[0] is not None
    assert used[1] is not None
    assert 0 < used[0] <= used[1] <= 1


def test_a_head_for_upright_images_is_a_quarter_of_one_for_all_rotations() -> None:
    sizes = [sum(values.numel() for values in RotationHead(5, 3, rotations).parameters()) for rotations in (1, 4)]
    assert sizes == [18, 72]
