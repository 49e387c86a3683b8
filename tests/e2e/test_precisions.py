"""int8 and fp16 answer the default's test images as fp32 does."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from serving.bundle.manifest import load_bundle
from serving.bundle.model import WORTH_ROUNDING, BundleModel
from tests.e2e.default import Line, run

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def bundle(line: Line, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("precisions") / "bundle"
    run("export", str(line.folder), "--out", str(place), "--precision", "int8", "fp16")
    return place


@pytest.mark.parametrize("precision", ["int8", "fp16"])
def test_labels_and_ranking_are_those_of_fp32(precision: str, line: Line, bundle: Path) -> None:
    wanted, got = (
        BundleModel.load(bundle, provider="cpu", precision=name).predict(line.pixels) for name in ("fp32", precision)
    )
    assert (got.class_id == wanted.class_id).mean() >= 0.99
    unknown = np.arange(len(line.pixels)) >= line.known
    change = roc_auc_score(unknown, got.unknown_score) - roc_auc_score(unknown, wanted.unknown_score)
    assert abs(change) <= 0.01


def test_a_cpu_runs_int8_only_if_it_is_measured_to_be_faster(bundle: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        model = BundleModel.load(bundle, provider="cpu", threads=1)
    (fp32, int8), (chosen,) = re.findall(r"([\d.]+) ms in", caplog.text), re.findall(r"CPU: (\w+) is used", caplog.text)
    assert model.precision == chosen
    # The log rounds both times to hundredths of a millisecond.
    ratio, rounding = float(int8) / float(fp32), 0.01 / float(fp32)
    assert chosen == "int8" or ratio > WORTH_ROUNDING - rounding
    assert chosen == "fp32" or ratio < WORTH_ROUNDING + rounding
    model.self_test()


def test_each_precision_stands_beside_the_same_fp32(line: Line, bundle: Path) -> None:
    """Another precision adds files and does not change those of fp32."""
    alone, together = (load_bundle(folder).manifest.files for folder in (line.bundle, bundle))
    for name in (name for name in alone if ".fp32." in name):
        assert together[name] == alone[name]
