from __future__ import annotations

import math

import pytest
import torch

from models.distance import RANK
from models.network import Network
from models.scores import DECISIONS, INGREDIENTS
from tests.helpers import learn_task, learn_task_head, random_images, tiny_network, tiny_task
from training.calibration import Correction
from training.classifier import _temperature_scale, fit_calibration, fit_detectors, task_said
from training.decisions import make_decider
from training.tasks import Batchable, TaskData


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
    said = logits_of(network, data.validation)
    answers = said.argmax(dim=1) if right else said.argmin(dim=1)
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


def test_two_right_answers_earn_a_confidence_of_three_quarters() -> None:
    # Platt's targets for two images of two classes are 3/4 and 1/4: the odds are e^scale = 3.
    scale = _temperature_scale(torch.eye(2), torch.tensor([0, 1]))
    assert scale == pytest.approx(math.log(3), rel=0.02)


def test_logits_ten_times_as_large_are_scaled_to_the_same() -> None:
    torch.manual_seed(0)
    logits, classes = torch.randn(20, 3).double(), torch.arange(20) % 3
    logits[torch.arange(20), classes] += 1
    assert _temperature_scale(10 * logits, classes) == pytest.approx(_temperature_scale(logits, classes) / 10)


def test_a_single_class_needs_no_scale() -> None:
    assert _temperature_scale(torch.randn(3, 1), torch.zeros(3, dtype=torch.int64)) == 1.0


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
    live = len(network.wires.after.live(0))
    assert 0 < live < network.wires.after.channels
    fit_detectors(network, 0, data)
    detector = network.detector(0)
    assert detector.tied.means.shape == (4, 2, live)
    assert detector.tied.basis.shape == (4, live, min(live, RANK))
    assert detector.deep.means.shape == (4, 2, live)
    assert detector.background.means.shape == (4, 1, live)
    assert detector.residual.mean.shape == (4, 1, live)


def test_a_task_remembers_what_it_says_of_its_validation_images(learned: tuple[Network, TaskData]) -> None:
    network, data = learned
    said = task_said(network, 0, data.validation.pixels)
    assert tuple(network.detector(0).remembered()) == INGREDIENTS
    for name, values in network.detector(0).remembered().items():
        assert values.shape == (len(data.validation), 2)
        assert torch.equal(values, said[name]), name


@pytest.mark.parametrize("name", DECISIONS)
def test_a_task_remembers_the_scores_of_its_validation_images(learned: tuple[Network, TaskData], name: str) -> None:
    network, data = learned
    decider = make_decider(network, name, 0.05, [Correction(1.5, -0.5)])
    rule = decider.rule.tasks[0]
    scores = decider.scorers[0].scores(task_said(network, 0, data.validation.pixels))
    assert rule.classes == 2
    assert sum(rule.validation_counts) == len(data.validation)
    assert rule.validation_scores == tuple(sorted(set(scores.tolist())))
