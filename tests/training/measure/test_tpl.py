"""TPL's scores on literal arrays, and the distances behind them against a plain search."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.nn import functional

from models.network import Network
from serving.bundle.decision import Rule, TaskRule
from tests.helpers import as_float, network_of_two_tasks, random_images, random_photos
from training.learn.buffer import Buffer
from training.measure.tpl import NEIGHBOURS, LikelihoodRatio, LikelihoodRatioOutputs

CPU = torch.device("cpu")
RULE = Rule(alpha=0.25, tasks=(TaskRule.fit([0.0, 1.0], 2), TaskRule.fit([0.0, 1.0], 1)))
PIXELS = random_photos(6, seed=5)


def near(first: list[float], second: list[float]) -> NDArray[np.float64]:
    """[1, 3 classes, 2 tasks, 5]: distances to the other task's kept images, in the features of each task."""
    table = np.full((1, 3, 2, NEIGHBOURS), np.inf)
    table[0, :2, 1, : len(first)] = first
    table[0, 2, 0, : len(second)] = second
    return table


OUTPUTS = {
    "logits": as_float([[1.0, 3.0, 2.0]]),
    "distances": as_float([[4.0, 0.5, 0.25]]),
    "near": near([0.1, 0.2, 0.3, 0.4, 0.7], [0.2, 0.6]),
}
WEIGHTS = LikelihoodRatio(np.array([0.5, 0.25]), np.array([0.1, 0.2]))


def test_the_score_by_hand() -> None:
    # The fifth nearest of the other task's images; of two, the second.
    first = np.log(np.exp(0.5 * 3.0) + np.exp(0.1 / 0.5 + 0.7))
    second = np.log(np.exp(0.25 * 2.0) + np.exp(0.2 / 0.25 + 0.6))
    assert WEIGHTS.scores(OUTPUTS, RULE)[0] == pytest.approx([first, second])
    verdicts = WEIGHTS(OUTPUTS, RULE)
    assert verdicts.class_id.tolist() == [1]
    assert verdicts.unknown_score == pytest.approx([-first])
    assert verdicts.p_task[0, 1] == pytest.approx(1 / (1 + np.exp((first - second) / 0.05)))
    assert verdicts.probability.sum() == pytest.approx(1)


def test_nearby_images_of_other_tasks_lower_the_score_of_a_task() -> None:
    nearer = {**OUTPUTS, "near": near([0.01] * 5, [0.2, 0.6])}
    assert WEIGHTS.scores(nearer, RULE)[0, 0] < WEIGHTS.scores(OUTPUTS, RULE)[0, 0]


def test_images_of_a_task_are_ignored_before_it_is_learned() -> None:
    alone = Rule(tasks=RULE.tasks[:1])
    then = {name: values[:, :2] for name, values in OUTPUTS.items()}
    assert WEIGHTS.scores(then, alone)[0] == pytest.approx([np.log(np.exp(1.5) + np.exp(0.2))])


def test_p_values_are_ranks_among_validation_images() -> None:
    usual = {name: np.concatenate([values] * 3) for name, values in OUTPUTS.items()}
    assert WEIGHTS.with_memory(usual, RULE)(OUTPUTS, RULE).p_value.tolist() == [1.0]
    foreign = {**OUTPUTS, "logits": OUTPUTS["logits"] - 5}
    verdicts = WEIGHTS.with_memory(usual, RULE)(foreign, RULE)
    assert verdicts.p_value.tolist() == [0.25]
    strict = RULE.model_copy(update={"alpha": 0.3})
    assert WEIGHTS.with_memory(usual, RULE)(foreign, strict).known.tolist() == [False]


@pytest.fixture(scope="module")
def network() -> Network:
    return network_of_two_tasks()


def test_the_nearest_kept_images_are_found_and_never_a_tasks_own(network: Network) -> None:
    kept = Buffer((random_images(9, 1, seed=8) * 255).to(torch.uint8), torch.tensor([0, 0, 0, 2, 2, 2, 3, 3, 3]))
    outputs = LikelihoodRatioOutputs(network, kept, np.array([0, 0, 1, 1]), CPU)(PIXELS)
    images = torch.from_numpy(PIXELS).permute(0, 3, 1, 2) / 255
    for task, others in ((0, slice(3, 9)), (1, slice(0, 3))):
        with torch.no_grad():
            seen, stored = (
                functional.normalize(network.live_features(pixels, task).deep, dim=2)
                for pixels in (images, kept.pixels[others] / 255)
            )
        apart = (seen[:, :, None] - stored[:, None]).square().sum(dim=3).sqrt().mean(dim=0)
        count = min(NEIGHBOURS, apart.shape[1])
        for column in (2 * task, 2 * task + 1):
            found = outputs["near"][:, column]
            np.testing.assert_allclose(found[:, 1 - task, :count], apart.sort(dim=1).values[:, :count], atol=1e-3)
            assert np.isinf(found[:, task]).all()
            assert np.isinf(found[:, 1 - task, count:]).all()


def test_the_weights_make_a_tasks_own_images_usual(network: Network) -> None:
    for detectors in map(network.detector, range(2)):
        means = detectors.own.means()
        detectors.remember({**means, "logits": means["logits"] + 3})
    fitted = LikelihoodRatio.fit(network)
    for task in range(2):
        memory: dict[str, Any] = network.detector(task).own.means()
        largest = memory["logits"].amax(dim=1).mean()
        assert fitted.logit_weights[task] * abs(float(largest)) == pytest.approx(1, rel=1e-4)
        nearness = (1 / memory["mahalanobis"].amin(dim=1)).mean()
        assert fitted.distance_weights[task] * float(nearness) == pytest.approx(1, rel=1e-4)
