from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from models.masks.hat import sharpness_at
from training.data.tasks import Batchable
from training.host.seeds import seed_everything, seed_from
from training.learn.features import batches
from training.learn.optimizers import TRUST, Lars, make_optimizer, set_lr, tenfold_steps, warmup_cosine


def stepped(start: list[float], gradient: list[float], lr: float) -> list[float]:
    """A parameter after the first step of LARS."""
    parameter = nn.Parameter(torch.tensor(start))
    parameter.grad = torch.tensor(gradient)
    Lars([parameter], lr).step()
    return parameter.tolist()


def test_a_long_step_is_cut_to_the_trusted_share_of_the_norm() -> None:
    # |w| = 5 and |lr * g| = 1, so the step is shortened to 0.005.
    assert stepped([3.0, 4.0], [0.0, 10.0], 0.1) == pytest.approx([3.0, 4.0 - 5 * TRUST])


def test_a_short_step_is_not_lengthened() -> None:
    assert stepped([3.0, 4.0], [0.0, 0.01], 0.1) == pytest.approx([3.0, 3.999])


def test_a_parameter_at_zero_takes_the_plain_step() -> None:
    assert stepped([0.0, 0.0], [0.0, 10.0], 0.1) == pytest.approx([0.0, -1.0])


def test_lars_has_momentum() -> None:
    parameter = nn.Parameter(torch.tensor([1e6]))
    optimizer = Lars([parameter], lr=1.0)
    for _ in range(2):
        parameter.grad = torch.ones(1)
        optimizer.step()
    assert parameter.item() == pytest.approx(1e6 - 1 - 1.9, abs=0.2)


def test_optimizers_by_name() -> None:
    parameters = [nn.Parameter(torch.ones(1))]
    assert isinstance(make_optimizer("lars", parameters, 0.1), Lars)
    adam = make_optimizer("adam", parameters, 0.1)
    assert isinstance(adam, torch.optim.Adam)
    set_lr(adam, 0.5)
    assert [group["lr"] for group in adam.param_groups] == [0.5]
    assert make_optimizer("sgd", parameters, 0.1).param_groups[0]["momentum"] == 0, "the paper's step 2 has none"
    with pytest.raises(ValueError, match="optimizer is 'rmsprop'; allowed: adam, lars, sgd"):
        make_optimizer("rmsprop", parameters, 0.1)


@pytest.mark.parametrize(
    ("progress", "share"), [(0.0, 0.0), (0.1, 0.5), (0.2, 1.0), (0.6, 0.5), (0.4, (1 + math.sqrt(0.5)) / 2), (1.0, 0.0)]
)
def test_learning_rate_rises_then_falls_along_a_cosine(progress: float, share: float) -> None:
    assert warmup_cosine(progress, 0.2) == pytest.approx(share)


@pytest.mark.parametrize(("progress", "share"), [(0.0, 0.1), (0.1, 0.55), (0.2, 1.0)])
def test_warming_up_may_start_above_zero(progress: float, share: float) -> None:
    assert warmup_cosine(progress, 0.2, 0.1) == pytest.approx(share)


@pytest.mark.parametrize(("progress", "share"), [(0.0, 1), (0.59, 1), (0.6, 0.1), (0.8, 0.01), (1.0, 0.001)])
def test_learning_rate_falls_tenfold_at_milestones(progress: float, share: float) -> None:
    assert tenfold_steps(progress, (0.6, 0.75, 0.9)) == pytest.approx(share)


def test_without_warm_up_the_full_rate_comes_first() -> None:
    assert warmup_cosine(0.0, 0.0) == 1.0


@pytest.mark.parametrize(("position", "sharpness"), [(0.0, 0.01), (0.5, 50.005), (1.0, 100.0)])
def test_sharpness_rises_linearly_from_its_inverse(position: float, sharpness: float) -> None:
    assert sharpness_at(position, 100.0) == pytest.approx(sharpness)


def test_batches_hold_every_image_once_with_its_class() -> None:
    torch.manual_seed(0)
    pixels = torch.arange(7, dtype=torch.uint8).view(7, 1, 1, 1)
    parts = list(batches(Batchable(pixels, torch.arange(7) * 10), 3))
    assert [len(images) for images, _, _ in parts] == [3, 3, 1]
    numbers = torch.cat([images for images, _, _ in parts]).flatten() * 255
    classes = torch.cat([classes for _, classes, _ in parts])
    assert sorted(classes.tolist()) == [0, 10, 20, 30, 40, 50, 60]
    torch.testing.assert_close(numbers * 10, classes.float())


def test_a_seed_is_made_of_its_coordinates_alone() -> None:
    assert seed_from(0, "task", 1) == seed_from(0, "task", 1)
    assert seed_from(0, 1, 23) != seed_from(0, 12, 3)
    assert 0 <= seed_from("anything") < 2**63
    seed_everything(1, "x")
    first = torch.rand(3)
    torch.rand(5)
    seed_everything(1, "x")
    assert torch.equal(torch.rand(3), first)
