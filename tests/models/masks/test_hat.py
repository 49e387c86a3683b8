from __future__ import annotations

import math

import pytest
import torch

from models.masks.hat import GatedLayer, UnitMask, sparsity
from models.masks.task_layer import Connection, Selection, Units


def mask_with(logits: list[float], sharpness: float | None = None) -> UnitMask:
    """A mask whose task 0 has these logits."""
    mask = UnitMask(len(logits), Selection(0, sharpness))
    add_gates(mask, logits)
    return mask


def add_gates(mask: UnitMask, logits: list[float]) -> None:
    mask.grow()
    with torch.no_grad():
        mask.logits[-1].copy_(torch.tensor(logits))


def test_gate_is_a_sigmoid_of_sharpness_times_logit() -> None:
    got = mask_with([-1.0, 0.0, 0.5], sharpness=2.0).gate()
    wanted = [1 / (1 + math.exp(2)), 0.5, 1 / (1 + math.exp(-1))]
    torch.testing.assert_close(got, torch.tensor(wanted))


def test_gate_of_a_finished_task_is_exactly_zero_or_one() -> None:
    mask = mask_with([-1e-6, 0.0, 1e-6, 5.0])
    assert mask.gate().tolist() == [0, 0, 1, 1]
    assert mask.live(0).tolist() == [2, 3]


def test_gate_is_that_of_the_selected_task() -> None:
    mask = mask_with([1.0, -1.0])
    add_gates(mask, [-1.0, 1.0])
    mask.selection.task = 1
    assert mask.gate().tolist() == [0, 1]


def test_units_without_a_mask_are_open_to_every_task() -> None:
    units = Units(3)
    assert units.gate() is None
    assert units.live(7).tolist() == [0, 1, 2]
    assert units.used.all()


@pytest.mark.parametrize("sharpness", [0.5, 3.0])
def test_compensate_multiplies_the_gradient_by_hats_formula(sharpness: float) -> None:
    logits, gradient, maximum = [0.3, -2.0], [1.0, -0.5], 10.0
    mask = mask_with(logits)
    mask.logits[0].grad = torch.tensor(gradient)
    mask.compensate(0, sharpness, maximum)
    wanted = [
        g * maximum / sharpness * (math.cosh(sharpness * e) + 1) / (math.cosh(e) + 1)
        for e, g in zip(logits, gradient, strict=True)
    ]
    torch.testing.assert_close(mask.logits[0].grad, torch.tensor(wanted))


def test_compensate_clamps_its_exponent_at_fifty() -> None:
    mask = mask_with([6.0])
    mask.logits[0].grad = torch.tensor([1e-20])
    mask.compensate(0, 700.0, 700.0)
    wanted = 1e-20 * (math.cosh(50) + 1) / (math.cosh(6) + 1)
    torch.testing.assert_close(mask.logits[0].grad, torch.tensor([wanted]))


def test_compensate_leaves_a_mask_without_gradient_alone() -> None:
    mask = mask_with([1.0])
    mask.compensate(0, 1.0, 700.0)
    assert mask.logits[0].grad is None


def test_clamp_keeps_logits_within_six() -> None:
    mask = mask_with([-7.0, 2.0, 9.0])
    mask.clamp(0)
    assert mask.logits[0].tolist() == [-6, 2, 6]


def test_finish_opens_the_gate_closest_to_opening_if_all_are_closed() -> None:
    mask = mask_with([-3.0, -0.1, -2.0])
    mask.finish(0)
    assert mask.live(0).tolist() == [1]
    assert mask.used.tolist() == [False, True, False]


def test_used_units_accumulate_over_tasks() -> None:
    mask = mask_with([1.0, -1.0, -1.0, -1.0])
    assert not mask.used.any()
    mask.finish(0)
    assert mask.used.tolist() == [True, False, False, False]
    add_gates(mask, [-1.0, -1.0, 2.0, -1.0])
    mask.finish(1)
    assert mask.used.tolist() == [True, False, True, False]


def test_sparsity_is_the_open_share_of_free_units_over_all_masks() -> None:
    first, second = mask_with([0.0, 0.0, 0.0], sharpness=1.0), mask_with([math.log(3), 0.0], sharpness=1.0)
    # Gates are 0.5, 0.5, 0.5 and 0.75, 0.5; the first unit of the first mask is used already and costs nothing.
    first.used[0] = True
    assert sparsity([first, second]).item() == pytest.approx((0.5 + 0.5 + 0.75 + 0.5) / 4)


def test_sparsity_is_zero_when_no_unit_is_free() -> None:
    mask = mask_with([3.0, 3.0], sharpness=1.0)
    mask.used.fill_(True)
    assert sparsity([mask]).item() == 0


def test_live_weights_have_all_inputs_of_a_live_unit() -> None:
    before, after = mask_with([-1.0, 1.0]), mask_with([1.0, -1.0])
    weight = torch.arange(12.0).view(2, 6)
    assert Connection(before, after, inputs_per_unit=3).live_weights(weight, 0).tolist() == [[3, 4, 5]]


def used(*units: bool) -> UnitMask:
    mask = UnitMask(len(units), Selection())
    mask.used.copy_(torch.tensor(units))
    return mask


def linear(before: Units, after: Units, inputs_per_unit: int = 1) -> GatedLayer:
    return GatedLayer(Connection(before, after, inputs_per_unit))


def frozen_of(layer: GatedLayer) -> tuple[torch.Tensor, torch.Tensor]:
    (weight, frozen_weight), (bias, frozen_bias) = layer.frozen()
    assert weight is layer.weight
    assert bias is layer.bias
    return frozen_weight, frozen_bias


def test_only_a_weight_between_two_used_units_is_frozen() -> None:
    weight, bias = frozen_of(linear(used(True, False), used(True, False)))
    assert weight.tolist() == [[True, False], [False, False]]
    assert bias.tolist() == [True, False]


def test_rows_are_the_units_after_and_columns_the_units_before() -> None:
    weight, bias = frozen_of(linear(used(False, True), used(True, False)))
    assert weight.tolist() == [[False, True], [False, False]]
    assert bias.tolist() == [True, False]


def test_all_inputs_of_a_used_unit_are_frozen() -> None:
    weight, _ = frozen_of(linear(used(False, True), used(True, False), inputs_per_unit=2))
    assert weight.tolist() == [[False, False, True, True], [False] * 4]


def test_a_kernel_is_frozen_whole() -> None:
    weight, bias = frozen_of(GatedLayer(Connection(used(True, False), used(True, False), kernel_size=3)))
    assert weight.shape == (2, 2, 3, 3)
    assert weight[0, 0].all()
    assert weight.sum() == 9
    assert bias.tolist() == [True, False]


def test_input_pixels_are_always_used() -> None:
    weight, _ = frozen_of(linear(Units(2), used(True, False)))
    assert weight.tolist() == [[True, True], [False, False]]
