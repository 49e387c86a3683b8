from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models.masks.hat import UnitMask
from models.network import Network
from tests.helpers import FEATURES, HEAD, learn_task, tiny_network, tiny_task, unit_masks
from training.config import Augmentation, FeatureLearning
from training.data.tasks import Batchable
from training.learn.features import batch_sizes, batches, epoch_order, learn_features
from training.learn.head import fit_head

QUARTERS_OF_A_COSINE = [(1 + math.cos(math.pi * share)) / 2 for share in (0.125, 0.375, 0.625, 0.875)]
"""The rate in the middle of each of four steps."""


class Watched(torch.optim.SGD):
    """Notes the learning rate and the gradients of every step."""

    def __init__(self, parameters: list[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.rates: list[float] = []
        self.gradients: list[dict[int, Tensor]] = []

    def step(self, closure: Any = None) -> Any:
        (group,) = self.param_groups
        self.rates.append(group["lr"])
        self.gradients.append({id(p): p.grad.clone() for p in group["params"] if p.grad is not None})
        return super().step(closure)


def learned_logits(*, tasks: int = 1, **changes: Any) -> Tensor:
    """All gate logits of the last of some tasks, learned with changed settings."""
    network = tiny_network("hat")
    how: FeatureLearning = replace(FEATURES, **changes)
    for task in range(tasks):
        network.add_task(2)
        optimizer = torch.optim.Adam(network.trainable(task), lr=how.lr)
        data = tiny_task(1, seed=task)
        list(learn_features(network, task, data, how, Augmentation(), optimizer, range(how.epochs)))
        network.finish(task)
    return torch.cat([mask.logits[tasks - 1].detach() for mask in unit_masks(network)])


def test_the_sparsity_term_shuts_gates() -> None:
    assert learned_logits(sparsity_first=100.0).mean() < learned_logits(sparsity_first=0.0).mean() - 0.05


def test_the_first_task_and_the_later_ones_have_sparsities_of_their_own() -> None:
    assert torch.equal(learned_logits(sparsity_later=0.0), learned_logits(sparsity_later=100.0))
    free, dear = (learned_logits(tasks=2, sparsity_later=weight) for weight in (0.0, 100.0))
    assert dear.mean() < free.mean() - 0.02


def test_gate_logits_stay_within_six() -> None:
    assert learned_logits(lr=50.0).abs().max() == 6


@pytest.mark.parametrize(
    ("batch_size", "epochs", "expected"),
    [(2, 2, [0.01, 50.005, 100.0] * 2), (6, 3, [0.01, 50.005, 100.0]), (6, 1, [0.01])],
    ids=["in every epoch", "over the epochs where each has one batch", "not at all where there is one step"],
)
def test_sharpness_runs_from_soft_to_hard(
    batch_size: int, epochs: int, expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[float, float]] = []
    real = UnitMask.compensate

    def compensate(self: UnitMask, task: int, sharpness: float, maximum: float) -> None:
        seen.append((sharpness, maximum))
        real(self, task, sharpness, maximum)

    monkeypatch.setattr(UnitMask, "compensate", compensate)
    learned_logits(batch_size=batch_size, epochs=epochs, max_sharpness=100.0)
    masks = len(unit_masks(tiny_network("hat")))
    assert [sharpness for sharpness, _ in seen] == [pytest.approx(each) for each in expected for _ in range(masks)]
    assert {maximum for _, maximum in seen} == {100.0}


@pytest.mark.parametrize(
    ("total", "size", "least", "expected"),
    [
        (7, 3, 1, [3, 3, 1]),
        (7, 3, 2, [3, 4]),
        (8, 3, 2, [3, 3, 2]),
        (6, 3, 2, [3, 3]),
        (4, 3, 2, [4]),
        (1, 3, 2, [1]),
        (2, 1, 2, [2]),
    ],
)
def test_a_last_batch_that_is_too_small_joins_the_one_before_it(
    total: int, size: int, least: int, expected: list[int]
) -> None:
    assert batch_sizes(total, size, least) == expected


def test_cross_entropy_learns_from_a_number_of_images_that_leaves_one_over() -> None:
    # The residual network's last maps of an image of 8x8 are a single pixel.
    network = tiny_network("hat", "resnet18", rotations=1, projection=0)
    network.add_task(2)
    how = replace(FEATURES, loss="ce", batch_size=5)
    optimizer = Watched(network.trainable(0), how.lr)
    data = tiny_task(3)
    assert len(data.train) % how.batch_size == 1
    losses = list(learn_features(network, 0, data, how, Augmentation(), optimizer, range(how.epochs)))
    assert all(math.isfinite(loss) for loss in losses)
    # One batch an epoch: the learning rate and the gates go their way to the end all the same.
    assert optimizer.rates == pytest.approx([how.lr * (1 + math.cos(math.pi * share)) / 2 for share in (0.25, 0.75)])


def watched_features(network: Network, task: int, how: FeatureLearning) -> Watched:
    optimizer = Watched(network.trainable(task), how.lr)
    data = tiny_task(1, seed=task)
    list(learn_features(network, task, data, how, Augmentation(), optimizer, range(how.epochs)))
    return optimizer


def test_the_optimizer_sees_the_whole_gradient_with_what_finished_tasks_use() -> None:
    """Trust ratios need it; what is protected is put back after the step."""
    network = tiny_network("hat")
    learn_task(network, tiny_task(1))
    frozen = [pair for layer in network.task_layers() for pair in layer.frozen()]
    network.add_task(2)
    for gradients in watched_features(network, 1, FEATURES).gradients:
        assert any(gradients[id(parameter)][mask].any() for parameter, mask in frozen)
        assert any(gradients[id(parameter)][~mask].any() for parameter, mask in frozen)


def test_learning_rates_of_step_one_warm_up_and_fall() -> None:
    network = tiny_network("hat")
    network.add_task(2)
    rates = watched_features(network, 0, replace(FEATURES, epochs=3, warmup_epochs=1, lr=1.0)).rates
    assert rates == pytest.approx([0.25, 0.75, *QUARTERS_OF_A_COSINE])


def test_learning_rates_of_step_two_fall() -> None:
    network, data = tiny_network("hat"), tiny_task(1)
    network.add_task(2)
    network.finish(0)
    optimizer = Watched(list(network.head(0).parameters()), 1.0)
    how = replace(HEAD, batch_size=3, lr=1.0)
    list(fit_head(network, 0, data, how, Augmentation(), optimizer, range(2)))
    assert optimizer.rates == pytest.approx(QUARTERS_OF_A_COSINE)


def test_the_loss_of_easy_images_falls() -> None:
    network = tiny_network("hat", seed=1)
    data = tiny_task(1, per_class=6)
    data.train.pixels[data.train.local_classes == 0] //= 8
    network.add_task(2)
    how = replace(FEATURES, epochs=10, batch_size=12, lr=0.02, sparsity_first=0.0)
    views = Augmentation(crop_area=(0.9, 1.0))
    optimizer = torch.optim.Adam(network.trainable(0), lr=how.lr)
    losses = list(learn_features(network, 0, data, how, views, optimizer, range(10)))
    assert losses[-1] < losses[0] - 0.1


def test_uneven_classes_are_drawn_equally_often() -> None:
    torch.manual_seed(0)
    local_classes = torch.tensor([0] * 40 + [1] * 5 + [2] * 10)
    order = epoch_order(local_classes)
    assert len(order) == 55
    assert torch.bincount(local_classes[order]).tolist() == [18, 18, 19]
    times = torch.bincount(order, minlength=55)
    assert times[:40].max() == 1, "a part of the large class, none of it twice"
    assert set(times[40:45].tolist()) == {3, 4}, "every image of a small class about equally often"
    other = epoch_order(local_classes)
    assert set(other[other < 40].tolist()) != set(order[order < 40].tolist()), "another part in each epoch"


@pytest.mark.parametrize("counts", [(10, 10), (20, 10)])
def test_classes_of_about_the_same_size_are_drawn_as_they_are(counts: tuple[int, int]) -> None:
    order = epoch_order(torch.arange(2).repeat_interleave(torch.tensor(counts)))
    assert sorted(order.tolist()) == list(range(sum(counts)))


def test_the_batches_of_both_steps_are_balanced() -> None:
    local_classes = torch.tensor([0] * 20 + [1] * 4)
    data = Batchable(torch.zeros(24, 1, 8, 8, dtype=torch.uint8), local_classes)
    seen = torch.cat([classes for _, classes, _ in batches(data, 5)])
    assert torch.bincount(seen).tolist() == [12, 12]
