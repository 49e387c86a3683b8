from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from models.detectors import decisions
from models.detectors.mahalanobis import RANK
from models.detectors.score import Features
from models.network import Network
from serving.bundle.decision import judge
from tests.helpers import assert_same_tensors, learn_task, learn_task_head, random_images, tiny_network, tiny_task
from training.config import Augmentation
from training.data.tasks import Batchable, TaskData
from training.learn import head as learned_head
from training.learn.augment import slight_change
from training.learn.correction import Correction
from training.learn.decisions import make_decider
from training.learn.folds import folds_of
from training.learn.head import fit_calibration, fit_detectors
from training.learn.measurements import task_measurements


@pytest.fixture
def learned() -> tuple[Network, TaskData]:
    network = tiny_network("hat")
    data = tiny_task(1, per_class=4)
    learn_task(network, data)
    return network, data


@torch.no_grad()
def logits_of(network: Network, data: Batchable) -> torch.Tensor:
    """Calibrated."""
    head = network.head(0)
    return network.logits(data.images(slice(None)), 0) * head.scale + head.shift


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("strength", [1e-3, 1.0, 1e3])
def test_calibration_is_finite_and_in_range_even_when_every_image_is_right(
    learned: tuple[Network, TaskData], right: bool, strength: float
) -> None:
    network, data = learned
    head = network.head(0)
    with torch.no_grad():
        head.weight.mul_(strength)
    logits = logits_of(network, data.validation)
    answers = logits.argmax(dim=1) if right else logits.argmin(dim=1)
    fit_calibration(network, 0, Batchable(data.validation.pixels, answers))
    assert 0.0099 < head.scale.item() < 100.1
    assert math.isfinite(head.shift.item())
    calibrated = logits_of(network, data.validation)
    assert calibrated.isfinite().all()
    size = float(calibrated.abs().max())
    assert calibrated.amax(dim=1).mean().item() == pytest.approx(0, abs=1e-5 * (1 + size))


def test_calibrating_twice_changes_nothing(learned: tuple[Network, TaskData]) -> None:
    network, data = learned
    before = logits_of(network, data.validation)
    fit_calibration(network, 0, data.validation)
    assert torch.equal(logits_of(network, data.validation), before)


def test_learning_a_head_changes_the_head_and_leaves_the_features() -> None:
    network = tiny_network("hat")
    data = tiny_task(1)
    task = learn_task(network, data)
    images = random_images(4, 1, seed=5)
    network.eval()
    with torch.no_grad():
        before = network.features(images, task)
    state = {name: value.clone() for name, value in network.state_dict().items()}
    learn_task_head(network, task, data)
    with torch.no_grad():
        assert torch.equal(network.features(images, task), before)
    changed = {name for name, value in network.state_dict().items() if not torch.equal(value, state[name])}
    assert {"heads.0.weight", "heads.0.bias"} <= changed
    assert all(name.startswith(("heads.0.", "detectors.0.")) for name in changed)


def test_detectors_are_fitted_on_live_features_only(learned: tuple[Network, TaskData]) -> None:
    network, data = learned
    live = len(network.connection.after.live(0))
    assert 0 < live < network.connection.after.channels
    fit_detectors(network, 0, data, Augmentation())
    detector = network.detector(0)
    assert detector.mahalanobis.means.shape == (4, 2, live)
    assert detector.mahalanobis.axes.shape == (4, live, min(live, RANK))
    assert detector.score("deep").get_buffer("means").shape == (4, 2, live)
    assert detector.score("relative").get_buffer("means").shape == (4, 1, live)
    assert detector.score("vim").get_buffer("mean").shape == (4, 1, live)


def test_a_task_remembers_the_measurements_of_its_validation_images_by_name(learned: tuple[Network, TaskData]) -> None:
    network, data = learned
    own = network.detector(0).own.means()
    columns = {"logits": 2, "mahalanobis": 2, "shallow": 2, "deep": 2, "relative": 1, "vim": 1}
    assert {name: values.shape for name, values in own.items()} == {
        name: (len(data.validation), count) for name, count in columns.items()
    }
    assert_same_tensors(own, task_measurements(network, 0, data.validation.pixels))


def test_detectors_are_fitted_to_slightly_changed_images_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    network, data = tiny_network("hat"), tiny_task(1, per_class=10)
    learn_task(network, data)
    torch.manual_seed(0)
    changed = (slight_change(data.train.images(slice(None)), Augmentation()) * 255).round().byte()
    with_copies = task_measurements(network, 0, changed)["shallow"].amin(dim=1).mean()
    monkeypatch.setattr(learned_head, "slight_change", lambda images, how, strength=1.0: images)
    fit_detectors(network, 0, data, Augmentation())
    assert with_copies < task_measurements(network, 0, changed)["shallow"].amin(dim=1).mean()


def test_every_training_image_is_measured_by_detectors_that_were_fitted_without_it() -> None:
    network, data = tiny_network("hat"), tiny_task(1, per_class=10)
    learn_task(network, data)
    left_out, in_sample = network.detector(0).left_out.means(), task_measurements(network, 0, data.train.pixels)
    assert {name: len(values) for name, values in left_out.items()} == dict.fromkeys(in_sample, 20)
    torch.testing.assert_close(left_out["logits"], in_sample["logits"], rtol=1e-4, atol=1e-4)
    # A detector knows the images that it was fitted to: without them, they are farther away.
    nearest = [values["deep"].amin(dim=1).mean() for values in (left_out, in_sample)]
    assert nearest[0] > nearest[1]


def test_folds_have_images_of_every_class_and_every_image_is_left_out_once() -> None:
    local_classes = torch.tensor([0] * 10 + [1] * 7)
    fold = folds_of(local_classes)
    assert sorted(set(fold.tolist())) == [0, 1, 2, 3, 4]
    for local_class, counts in ((0, [2, 2, 2, 2, 2]), (1, [2, 2, 1, 1, 1])):
        assert torch.bincount(fold[local_classes == local_class]).tolist() == counts
    assert sorted(folds_of(torch.tensor([0, 1, 0, 1, 1])).tolist()) == [0, 0, 1, 1, 2], "each class by its own number"


def test_the_only_image_of_a_class_is_in_every_fit_and_the_others_are_left_out() -> None:
    fold = folds_of(torch.tensor([0, 1, 1, 1]))
    assert fold[0] == -1
    assert sorted(fold[1:].tolist()) == [0, 1, 2]
    network, data = tiny_network("hat"), tiny_task(1, per_class=10)
    only = torch.cat([(data.train.local_classes == 0).nonzero()[:1], (data.train.local_classes == 1).nonzero()])[:, 0]
    learn_task(network, replace(data, train=Batchable(data.train.pixels[only], data.train.local_classes[only])))
    detector = network.detector(0)
    assert len(detector.left_out.means()["logits"]) == len(only) - 1
    remembered = detector.remembered_classes[len(data.validation) :]
    assert remembered.tolist() == [1] * (len(only) - 1)


def test_with_enough_validation_images_nothing_else_is_remembered(
    learned: tuple[Network, TaskData], monkeypatch: pytest.MonkeyPatch
) -> None:
    network, data = learned
    assert network.detector(0).left_out.means()
    monkeypatch.setattr(learned_head, "ENOUGH_VALIDATION", len(data.validation))
    fresh = tiny_network("hat")
    learn_task(fresh, data)
    assert not fresh.detector(0).left_out.means()
    assert_same_tensors(fresh.detector(0).memory(), fresh.detector(0).own.means())


@pytest.mark.parametrize("name", decisions())
def test_the_rule_has_the_scores_of_a_tasks_own_images(learned: tuple[Network, TaskData], name: str) -> None:
    network, data = learned
    decider = make_decider(network, name, 0.05, [Correction(1.5, -0.5)])
    rule = decider.rule.tasks[0]
    scores = decider.scorers[0].task_scores(network.detector(0).memory())
    assert rule.classes == 2
    assert rule.images == len(data.validation) + len(data.train)
    assert rule.own_scores == tuple(sorted(set(scores.tolist())))


@pytest.mark.parametrize(("shares", "chosen"), [([0.1], 1.0), ([0.3, 0.2], 1.5), ([0.9, 0.8, 0.7], 2.0)])
def test_copies_are_changed_as_weakly_as_validation_images_allow(
    learned: tuple[Network, TaskData], monkeypatch: pytest.MonkeyPatch, shares: list[float], chosen: float
) -> None:
    network, data = learned
    measured = iter(shares)
    monkeypatch.setattr(learned_head, "_share_unknown", lambda *_: next(measured))
    assert fit_detectors(network, 0, data, Augmentation()) == (chosen, shares[-1])
    assert next(measured, None) is None


def test_copies_of_each_strength_take_the_place_of_those_before(
    learned: tuple[Network, TaskData], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On many images the copies are most of the memory, so no two strengths may be held at once."""
    network, data = learned
    monkeypatch.setattr(learned_head, "_share_unknown", lambda *_: 1.0)
    fitted: list[Features] = []

    def fit_and_remember(network: Network, task: int, data: TaskData, every: Features) -> None:
        fitted.append(every)
        contents.append(every.deep.clone())

    contents: list[torch.Tensor] = []
    monkeypatch.setattr(learned_head, "_fit_and_remember", fit_and_remember)
    fit_detectors(network, 0, data, Augmentation())
    assert len({(each.deep.data_ptr(), each.shallow.data_ptr()) for each in fitted}) == 1
    assert len(fitted) == len(learned_head.STRENGTHS)
    first, second = contents[:2]
    assert first.shape[1:3] == (len(data.train), 1 + learned_head.COPIES)
    assert torch.equal(first[:, :, 0], second[:, :, 0])
    assert all((first[:, :, copy] != second[:, :, copy]).any() for copy in range(1, 1 + learned_head.COPIES))
    # Without copies, only the images are left.
    fit_detectors(network, 0, data, Augmentation(), strengths=[0.0])
    torch.testing.assert_close(fitted[-1].deep, first[:, :, :1])


def test_the_share_of_changed_images_that_is_called_unknown_is_that_of_the_tasks_own_rule() -> None:
    network, data = tiny_network("hat"), tiny_task(1, per_class=20)
    learn_task(network, data)
    pixels = torch.cat([data.validation.pixels, 255 - data.validation.pixels])
    with torch.no_grad():
        features = learned_head._live_features(network, 0, Batchable(pixels, data.train.local_classes.repeat(2)))
        share, finer = (learned_head._share_unknown(network, 0, features, alpha) for alpha in (0.1, 0.01))
    decider = make_decider(network, "features", 0.1)
    outputs = decider.outputs([task_measurements(network, 0, pixels)])
    assert share == pytest.approx(1 - judge(outputs, decider.rule).known.mean())
    assert finer == 0, "80 images cannot reject at 0.01"
