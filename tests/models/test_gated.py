from __future__ import annotations

import torch

from models.gated import GatedConv2d, GatedLinear
from models.task_layer import Selection
from models.unit_mask import UnitMask, Units


def taken(*units: bool) -> UnitMask:
    mask = UnitMask(len(units), Selection())
    mask.taken.copy_(torch.tensor(units))
    return mask


def frozen_of(layer: GatedLinear | GatedConv2d) -> tuple[torch.Tensor, torch.Tensor]:
    (weight, frozen_weight), (bias, frozen_bias) = layer.frozen()
    assert weight is layer.weight
    assert bias is layer.bias
    return frozen_weight, frozen_bias


def test_only_a_weight_between_two_taken_units_is_frozen() -> None:
    weight, bias = frozen_of(GatedLinear(taken(True, False), taken(True, False)))
    assert weight.tolist() == [[True, False], [False, False]]
    assert bias.tolist() == [True, False]


def test_rows_are_the_units_after_and_columns_the_units_before() -> None:
    weight, bias = frozen_of(GatedLinear(taken(False, True), taken(True, False)))
    assert weight.tolist() == [[False, True], [False, False]]
    assert bias.tolist() == [True, False]


def test_all_inputs_that_a_taken_unit_spreads_over_are_frozen() -> None:
    weight, _ = frozen_of(GatedLinear(taken(False, True), taken(True, False), spread=2))
    assert weight.tolist() == [[False, False, True, True], [False] * 4]


def test_a_kernel_is_frozen_whole() -> None:
    weight, bias = frozen_of(GatedConv2d(taken(True, False), taken(True, False), 3, bias=True))
    assert weight.shape == (2, 2, 3, 3)
    assert weight[0, 0].all()
    assert weight.sum() == 9
    assert bias.tolist() == [True, False]


def test_input_pixels_are_always_taken() -> None:
    weight, _ = frozen_of(GatedLinear(Units(2), taken(True, False)))
    assert weight.tolist() == [[True, True], [False, False]]
