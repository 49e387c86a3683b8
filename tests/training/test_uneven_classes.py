"""A run whose classes have very different numbers of images: learned evenly, and reported."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers import tiny_source, use_tiny_preset
from training import fit
from training.data.datasets import SOURCES
from training.data.images import Source
from training.data.reader import Reader
from training.learn import decisions
from training.run import open_run
from training.store.checkpoint import METRICS


def uneven_source(reader: Reader | None = None, data: str | None = None) -> Source:
    """As `tiny_source`, with 4 training images of "one" instead of 10."""
    source = tiny_source(reader, data)
    rows = np.arange(len(source.train))
    ones = (source.train.labels == "one").nonzero()[0]
    return replace(source, train=source.train.at(np.setdiff1d(rows, ones[4:])))


@pytest.fixture(scope="module")
def uneven_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uneven")
    with pytest.MonkeyPatch.context() as patch:
        use_tiny_preset(patch)
        patch.setitem(SOURCES, "tiny", uneven_source)
        with (folder / "printed").open("w") as printed:
            patch.setattr("sys.stderr", printed)
            assert fit.main(["--out", str(folder / "run")]) == 0
    return folder


def test_uneven_classes_are_reported_before_they_are_learned(uneven_run: Path) -> None:
    printed = (uneven_run / "printed").read_text()
    # Of 10 and 4 images, a share of 0.4 is for validation.
    assert "task 0 (zero, one): its classes are uneven: 2 training images of one, 6 of zero." in printed
    assert "task 1 (two, three): its classes are uneven" not in printed
    assert "task 1 (two, three): 20 images are too few" not in printed
    assert "task 0 (zero, one): 14 images are too few to call an image unknown at alpha 0.05" in printed


def test_metrics_name_the_uneven_tasks(uneven_run: Path) -> None:
    result = json.loads((uneven_run / "run" / METRICS).read_text())
    assert result["uneven_tasks"] == [{"task": 0, "training_images": {"zero": 6, "one": 2}}]


def test_only_uneven_classes_are_standardised_one_by_one(uneven_run: Path) -> None:
    network = open_run(uneven_run / "run", torch.device("cpu")).network
    detector = network.detector(0)
    assert torch.bincount(detector.remembered_classes).tolist() == [10, 4]
    uneven, even = decisions.make_decider(network, "fused", 0.05).scorers
    assert len(set(uneven.weights[0])) == 2
    assert len(set(even.weights[0])) == 1


def test_uneven_classes_count_equally_if_that_leaves_a_chance_to_reject(uneven_run: Path) -> None:
    network = open_run(uneven_run / "run", torch.device("cpu")).network
    uneven, even = decisions.make_decider(network, "fused", 0.2).rule.tasks
    assert uneven.least_p_value == pytest.approx((1 / 11 + 1 / 5) / 2)
    assert even.own_weights == ()
    # With 4 images of a class, no image could be rejected at alpha 0.1: every image counts the same.
    rule, _ = decisions.make_decider(network, "fused", 0.1).rule.tasks
    assert rule.least_p_value == 1 / 15
