from __future__ import annotations

import math

import pytest
import torch

from training.learn.temperature import temperature_scale


def test_two_right_answers_earn_a_confidence_of_three_quarters() -> None:
    # Platt's targets for two images of two classes are 3/4 and 1/4: the odds are e^scale = 3.
    scale = temperature_scale(torch.eye(2), torch.tensor([0, 1]))
    assert scale == pytest.approx(math.log(3), rel=0.02)


def test_logits_ten_times_as_large_are_scaled_to_the_same() -> None:
    torch.manual_seed(0)
    logits, classes = torch.randn(20, 3).double(), torch.arange(20) % 3
    logits[torch.arange(20), classes] += 1
    assert temperature_scale(10 * logits, classes) == pytest.approx(temperature_scale(logits, classes) / 10)


def test_a_single_class_needs_no_scale() -> None:
    assert temperature_scale(torch.randn(3, 1), torch.zeros(3, dtype=torch.int64)) == 1.0
