"""The cost of the detectors: a graph with the default decision against the paper's, which has no detectors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from models.config import NetworkConfig
from models.detectors.mixture import COMPONENTS
from serving.bundle.model import BundleModel
from tests.benchmarks.conftest import Report, table
from tests.benchmarks.exported import CLASSES, random_run, resnet, write_bundle
from tests.benchmarks.timing import take_turns
from training.learn.decisions import choose, make_decider
from training.presets import PRESETS

TASKS = 5
THREADS = 2
DEFAULT = choose({})
NETWORKS: dict[str, tuple[NetworkConfig, int]] = {
    "resnet18": (resnet("hat"), 40),
    "mnist-5t-cpu": (PRESETS["mnist-5t-cpu"].network, 400),
}
"""The number of runs of each."""
MOST = {"resnet18": 1.10}


@pytest.mark.parametrize("name", NETWORKS)
def test_the_default_decision_costs_little_more_than_the_papers(name: str, report: Report, tmp_path: Path) -> None:
    config, rounds = NETWORKS[name]
    run = random_run(config, TASKS, decision=DEFAULT)
    assert run.network.detector(0).own.means()["deep"].shape[1] == COMPONENTS * CLASSES
    contestants: dict[str, Callable[[], object]] = {}
    for decision in ("paper", DEFAULT):
        decider = make_decider(run.network, decision, run.rule.alpha)
        write_bundle(tmp_path / decision, replace(run, decider=decider))
        model = BundleModel.load(tmp_path / decision, provider="cpu", precision="fp32", threads=THREADS)
        one = model.bundle.golden.pixels[2:3]
        contestants[decision] = lambda model=model, one=one: model.run(one)  # type: ignore[misc]
    taken = take_turns(contestants, rounds)
    dear, cheap = taken[DEFAULT].wall, taken["paper"].wall
    report.add(f"{name} fp32, decision {DEFAULT} against paper, one image", dear, "ms", cheap)
    rows = [(decision, f"{each.wall:.2f}", f"{each.processor:.2f}") for decision, each in taken.items()]
    print(f"\n\n{table((name, 'ms an image', 'processor ms'), rows)}\nratio {dear / cheap:.3f}")
    assert dear / cheap <= MOST.get(name, float("inf"))
