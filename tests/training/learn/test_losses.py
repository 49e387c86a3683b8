from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from training.learn.losses import supervised_contrastive


def slow_loss(vectors: Tensor, classes: list[int], temperature: float) -> float:
    """The paper's L_c, sum by sum; a class alone in the batch has no P(x) and adds nothing."""
    total = 0.0
    for x, own in enumerate(classes):
        positives = [p for p, other in enumerate(classes) if other == own and p != x]
        below = sum(
            math.exp(float(vectors[x] @ vectors[other]) / temperature) for other in range(len(classes)) if other != x
        )
        for p in positives:
            total -= math.log(math.exp(float(vectors[x] @ vectors[p]) / temperature) / below) / len(positives)
    return total / len(classes)


@pytest.mark.parametrize("classes", [[0, 0, 1, 1], [0, 0, 0, 1, 1, 2], [2, 1, 0, 1, 2, 1, 1], [0, 1, 2], [3, 3]])
@pytest.mark.parametrize("temperature", [0.07, 1.0])
def test_loss_is_the_papers_formula(classes: list[int], temperature: float) -> None:
    torch.manual_seed(0)
    vectors = functional.normalize(torch.randn(len(classes), 5, dtype=torch.float64), dim=1)
    got = supervised_contrastive(vectors, torch.tensor(classes), temperature)
    assert got.item() == pytest.approx(slow_loss(vectors, classes, temperature), rel=1e-9)


def test_loss_is_smaller_when_equal_classes_are_near() -> None:
    together = torch.tensor([[1.0, 0], [1, 0], [0, 1], [0, 1]])
    apart = torch.tensor([[1.0, 0], [0, 1], [1, 0], [0, 1]])
    classes = torch.tensor([0, 0, 1, 1])
    assert supervised_contrastive(together, classes, 0.07) < supervised_contrastive(apart, classes, 0.07)


@pytest.mark.parametrize("classes", [[0, 0, 1, 2], [0, 1, 2, 3], [0, 0, 0, 0]])
def test_gradient_is_finite_with_lone_classes_and_equal_vectors(classes: list[int]) -> None:
    vectors = functional.normalize(torch.tensor([[1.0, 2], [1, 2], [-1, -2], [3, 0]]), dim=1).requires_grad_()
    supervised_contrastive(vectors, torch.tensor(classes), 0.07).backward()
    assert vectors.grad is not None
    assert vectors.grad.isfinite().all()
