from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from models.backbones.convnet import max_pooled


@pytest.mark.parametrize("sides", [(16, 16), (7, 9), (2, 3)])
def test_pooling_is_torchs_with_gradients_and_without(sides: tuple[int, int]) -> None:
    images = torch.randn(3, 5, *sides, generator=torch.Generator().manual_seed(0))
    # The case of a dead unit: all neighbours are equal.
    images[:, 0] = 0.5
    images[0, 1, 0, 0] = torch.nan
    expected = functional.max_pool2d(images, 2)
    assert torch.equal(max_pooled(images).nan_to_num(-9), expected.nan_to_num(-9))
    watched = images.clone().requires_grad_()
    pooled = max_pooled(watched)
    assert torch.equal(pooled.nan_to_num(-9), expected.nan_to_num(-9))
    pooled[1:].sum().backward()
    assert watched.grad is not None
    assert watched.grad.sum() == pooled[1:].numel()
