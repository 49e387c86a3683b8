"""Whole numbers and half precision answer the default's test images as fp32 does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from serving.bundle import load_bundle
from serving.runtime import Model
from tests.e2e.default import Line, run


@pytest.fixture(scope="module")
def bundle(line: Line, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("precisions") / "bundle"
    run("export", str(line.folder), "--out", str(place), "--precision", "int8", "fp16")
    return place


@pytest.mark.parametrize("precision", ["int8", "fp16"])
def test_labels_and_ranking_are_those_of_fp32(precision: str, line: Line, bundle: Path) -> None:
    wanted, got = (
        Model.load(bundle, provider="cpu", precision=name).predict(line.pixels) for name in ("fp32", precision)
    )
    assert (got.class_id == wanted.class_id).mean() >= 0.99
    unknown = np.arange(len(line.pixels)) >= line.known
    change = roc_auc_score(unknown, got.unknown_score) - roc_auc_score(unknown, wanted.unknown_score)
    assert abs(change) <= 0.01


def test_a_cpu_is_served_whole_numbers(bundle: Path) -> None:
    model = Model.load(bundle, provider="cpu", precision="auto")
    assert model.precision == "int8"
    model.self_test()


def test_each_precision_stands_beside_the_same_fp32(line: Line, bundle: Path) -> None:
    """Another precision adds files; those of fp32 stay what they are without it."""
    alone, together = (load_bundle(folder).manifest.files for folder in (line.bundle, bundle))
    for name in (name for name in alone if ".fp32." in name):
        assert together[name] == alone[name]
