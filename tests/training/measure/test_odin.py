from __future__ import annotations

import numpy as np
import pytest
import torch

from models.network import Network
from tests.helpers import network_of_two_tasks, random_images, random_photos
from training.measure.odin import Odin, direction_of, odin_grid, odin_logits

PIXELS = random_photos(6, seed=5)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def network() -> Network:
    return network_of_two_tasks()


def test_the_direction_is_the_sign_of_the_gradient_of_the_largest_log_softmax(network: Network) -> None:
    images = random_images(3, 1).double()
    network = network.double()
    direction = direction_of(network, 1, images, 2.0, 1.0)

    @torch.no_grad()
    def surest(images: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(network.logits(images, 1) / 2.0, dim=1).amax(dim=1)

    for row, column in ((0, 0), (3, 4), (7, 2)):
        step = torch.zeros_like(images)
        step[:, :, row, column] = 1e-6
        slope = (surest(images + step) - surest(images - step)) / 2e-6
        seen = slope.abs() > 1e-6
        assert torch.equal(direction[:, 0, row, column][seen], slope.sign()[seen])
    network.float()


def test_without_a_step_only_the_temperature_is_left(network: Network) -> None:
    plain = odin_logits(network, PIXELS, Odin(1.0, 0.0), CPU)["logits"]
    tempered = odin_logits(network, PIXELS, Odin(4.0, 0.0), CPU)["logits"]
    with torch.no_grad():
        images = torch.from_numpy(PIXELS).permute(0, 3, 1, 2) / 255
        wanted = torch.cat([network.logits(images, task) for task in range(2)], dim=1)
    np.testing.assert_allclose(plain, wanted, atol=1e-5)
    np.testing.assert_allclose(tempered, plain / 4, atol=1e-6)


def test_a_small_step_makes_every_task_more_confident(network: Network) -> None:
    before, after = odin_grid(network, PIXELS, 1.0, (0.0, 0.002), CPU)
    for own in (slice(0, 2), slice(2, 4)):
        gained = [torch.log_softmax(torch.from_numpy(logits[:, own]), dim=1).amax(dim=1) for logits in (before, after)]
        assert (gained[1] >= gained[0] - 1e-6).all()
        assert (gained[1] > gained[0]).any()


def test_a_correction_scales_before_the_temperature(network: Network) -> None:
    three = Odin(3.0, 0.01)
    plain, scaled = (odin_logits(network, PIXELS, three, CPU, scales)["logits"] for scales in ((), (3.0, 3.0)))
    np.testing.assert_allclose(scaled, odin_logits(network, PIXELS, Odin(1.0, 0.01), CPU)["logits"], atol=1e-5)
    assert not np.allclose(plain, scaled)


@pytest.mark.parametrize(("temperature", "epsilon"), [(0.0, 0.1), (1.0, -0.1)])
def test_impossible_numbers_are_refused(temperature: float, epsilon: float) -> None:
    with pytest.raises(ValueError, match="allowed: temperature above 0 and epsilon 0 or more"):
        Odin(temperature, epsilon)
