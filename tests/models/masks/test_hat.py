from __future__ import annotations

import torch

from models.masks.hat import GatedLayer, UnitMask
from models.masks.task_layer import Connection, Selection, Units


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
