"""The accuracy of int8 against fp32 on a run's validation and test images.

BENCH_DIGITS_RUN and BENCH_MNIST_RUN name finished runs of the default digits and of mnist-5t-cpu, with their images
where they were learned from. Without the first, the digits are learned here; without the second, MNIST is left out.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from export.checks.parity import AGREEING, AUROC_CHANGE, verify_precision
from export.exporter import export
from export.graph.evidence import Evidence, gather
from export.graph.session import GraphQuery, WholeGraph
from serving.bundle.manifest import load_bundle
from tests.benchmarks.conftest import Report, table
from training import fit
from training.config import RunConfig
from training.data.sources import Sources
from training.run import open_run

MEASURES = {"label_agreement": "share", "unknown_agreement": "share", "largest_task_auroc_change": "AUROC"}
RUNS = {"digits": "BENCH_DIGITS_RUN", "mnist-5t-cpu": "BENCH_MNIST_RUN"}


@pytest.mark.parametrize("name", RUNS)
def test_int8_keeps_the_accuracy(name: str, report: Report, tmp_path: Path) -> None:
    folder = finished_run(name, tmp_path / "run")
    run = open_run(folder, torch.device("cpu"))
    assert run.config.preset.name == name
    # Refused if the validation images do not agree as they must.
    export(folder, tmp_path / "bundle", precisions=("fp32", "int8"))
    bundle = load_bundle(tmp_path / "bundle")
    rows = []
    for kind, images in (("validation", gather(run)), ("test", images_of_tests(run.config))):
        exact, got = (WholeGraph(bundle.path, each).run([GraphQuery(images.pixels)])[0] for each in ("fp32", "int8"))
        found = verify_precision("int8", exact, got, bundle.rule, images)
        for measure, unit in MEASURES.items():
            allowed = AUROC_CHANGE if unit == "AUROC" else AGREEING[measure]
            label = f"{name} int8 against fp32, {kind} images, {measure.replace('_', ' ')}"
            report.add(label, found[measure], unit, allowed)
        rows.append((f"{len(images)} {kind}", *(f"{found[measure]:.5f}" for measure in MEASURES)))
    print(f"\n\n{table((f'{name} images', *(measure.replace('_', ' ') for measure in MEASURES)), rows)}")


def finished_run(name: str, folder: Path) -> Path:
    if given := os.environ.get(RUNS[name]):
        return Path(given)
    if name != "digits":
        pytest.skip(f"{RUNS[name]} names no finished run of {name}")
    assert fit.main(["--out", str(folder)]) == 0
    return folder


def images_of_tests(config: RunConfig) -> Evidence:
    """The test images of all classes that were learned."""
    images = Sources(config).test_images()[0].test
    tasks = {label: task for task, labels in enumerate(config.tasks) for label in labels}
    learned = np.isin(images.labels, list(tasks))
    class_ids = {label: class_id for class_id, label in enumerate(config.labels)}
    of_task, of_class = (np.array([ids[label] for label in images.labels[learned]]) for ids in (tasks, class_ids))
    return Evidence(images.pixels[learned], of_task, of_class, ())
