from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from models.masks.hat import UnitMask
from models.masks.task_layer import Selection
from models.masks.task_norm import TaskNorm

CHANNELS = 5


def norm_with_tasks(count: int, selection: Selection, affine: bool) -> tuple[TaskNorm, UnitMask]:
    torch.manual_seed(0)
    mask = UnitMask(CHANNELS, selection)
    norm = TaskNorm(mask, selection, affine)
    for task in range(count):
        mask.grow()
        norm.grow()
        if affine:
            with torch.no_grad():
                norm.of(task).weight.copy_(torch.randn(CHANNELS))
                norm.of(task).bias.copy_(torch.randn(CHANNELS))
    return norm, mask


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("learning", [True, False])
@pytest.mark.parametrize("sharpness", [None, 1.5])
def test_folded_gate_equals_relu_of_the_norm_times_the_gate(
    affine: bool, learning: bool, sharpness: float | None
) -> None:
    norm, mask = norm_with_tasks(1, Selection(0, sharpness), affine)
    images = torch.randn(6, CHANNELS, 4, 4) * 2 + 1
    norm.train()
    norm(torch.randn(6, CHANNELS, 4, 4))
    norm.train(learning)
    plain = norm.of(0)
    wanted = functional.batch_norm(
        images,
        None if learning else plain.running_mean,
        None if learning else plain.running_var,
        plain.weight,
        plain.bias,
        learning,
    )
    wanted = functional.relu(wanted) * mask.gate()[:, None, None]
    torch.testing.assert_close(functional.relu(norm(images)), wanted)


def test_learning_one_task_leaves_the_statistics_of_another() -> None:
    norm, _ = norm_with_tasks(2, Selection(0, 1.0), affine=True)
    norm.train()
    before = {name: value.clone() for name, value in norm.of(0).state_dict().items()}
    norm.selection.task = 1
    norm(torch.randn(6, CHANNELS, 4, 4) + 3)
    assert all(torch.equal(value, before[name]) for name, value in norm.of(0).state_dict().items())
    assert norm.of(1).running_mean is not None
    assert (norm.of(1).running_mean > 0.1).all()


def test_only_the_parameters_of_the_task_are_trainable() -> None:
    norm, _ = norm_with_tasks(2, Selection(), affine=True)
    trainable = list(norm.trainable(1))
    assert [id(p) for p in trainable] == [id(norm.of(1).weight), id(norm.of(1).bias)]


def test_live_affine_is_the_finished_norm_as_one_scale_and_shift() -> None:
    norm, mask = norm_with_tasks(1, Selection(), affine=True)
    norm.train()
    norm(torch.randn(6, CHANNELS, 4, 4) * 2 + 1)
    norm.eval()
    images = torch.randn(3, CHANNELS, 4, 4)
    scale, shift = norm.live_affine(0)
    live = mask.live(0)
    assert 0 < len(live) < CHANNELS
    wanted = images[:, live] * scale[:, None, None] + shift[:, None, None]
    torch.testing.assert_close(norm(images)[:, live], wanted.float())
