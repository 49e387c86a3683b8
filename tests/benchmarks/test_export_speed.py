"""The gain from exporting: time and size of a bundle against the network that it was made from.

Contestants take turns, and medians are compared; times mean something only as ratios within one run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from export.exporter import export
from export.graph.evidence import Evidence, gather
from export.graph.session import run_graph
from models.masks.hat import GatedLayer
from models.masks.supermask import MaskedLayer
from models.network import Network
from serving.bundle.decision import decide
from serving.bundle.model import BundleModel
from serving.bundle.sections import Cascade
from tests.benchmarks import export_memory
from tests.benchmarks.conftest import Report, table
from tests.benchmarks.eager import eager_logits, prepare_masks
from tests.benchmarks.exported import random_run, resnet, write_bundle
from tests.benchmarks.many_tasks import guised_digits, guises_known, learn_twenty_tasks
from tests.benchmarks.timing import take_turns
from training.data.reader import PixelReader
from training.host.device import choose_device
from training.run import open_run

ROUNDS = 25
THREADS = 2
TASKS = 5
MANY = 20
SEEN = 2.25
"""Candidates among twenty tasks with random weights: as many as trained tasks need on average."""
TIMES_AS_FAST = {("hat", "fp32"): 6.0, ("hat", "int8"): 14.0, ("sup", "fp32"): 1.7, ("sup", "int8"): 4.0}
SHARE_OF_NAIVE = {"hat": 1 / 3, "sup": 1 / 15}
SHARE_WITH_CASCADE = 1 / 2
AGREEING = 0.999
MEGABYTES = 8 * 1024


@pytest.mark.parametrize("method", ["hat", "sup"])
def test_a_bundle_is_faster_and_smaller_than_its_network(method: str, report: Report, tmp_path: Path) -> None:
    run = random_run(resnet(method), TASKS)
    prepare_masks(run.network)
    sizes = {}
    contestants: dict[str, Callable[[], object]] = {}
    for precision in ("fp32", "int8"):
        folder = tmp_path / precision
        manifest = write_bundle(folder, run, [precision])
        sizes[precision] = folder_size(folder)
        model = BundleModel.load(folder, provider="cpu", precision=precision, threads=THREADS)
        one = model.bundle.golden.pixels[2:3]
        contestants[precision] = lambda model=model, one=one: model.run(one)  # type: ignore[misc]
        if precision == "fp32":
            wanted = eager_logits(run.network, one).numpy()
            np.testing.assert_allclose(model.run(one)["logits"], wanted, rtol=1e-3, atol=1e-3)
    contestants = {"eager": lambda: eager_logits(run.network, one), **contestants}
    taken = take_turns(contestants, ROUNDS)
    naive = len(manifest.tasks) * dense_bytes(run.network)
    rows = [("eager torch, masks multiplied", f"{taken['eager'].wall:.1f}", "1.0", f"{naive / 1e6:.1f}", "1")]
    for precision, size in sizes.items():
        report.add(f"{method} {precision}, one image", taken[precision].wall, "ms", taken["eager"].wall)
        report.add(f"{method} {precision}, bundle", size / 1e6, "MB", naive / 1e6)
        faster = taken["eager"].wall / taken[precision].wall
        milliseconds, megabytes = f"{taken[precision].wall:.1f}", f"{size / 1e6:.1f}"
        rows.append((f"bundle, {precision}", milliseconds, f"{faster:.1f}", megabytes, f"1/{naive / size:.1f}"))
    head = (method, "ms an image", "times as fast", "MB", "of dense weights a task")
    print(f"\n\n{table(head, rows)}")
    for precision in sizes:
        assert taken["eager"].wall / taken[precision].wall >= TIMES_AS_FAST[method, precision]
    assert sizes["fp32"] / naive <= SHARE_OF_NAIVE[method]


def folder_size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def dense_bytes(network: Network) -> int:
    """The size of one unpruned task in fp32: the weights of all channels, a bias for each (BatchNorm), its head."""
    layers = [module for module in network.body.modules() if isinstance(module, GatedLayer | MaskedLayer)]
    weights = sum(layer.weight.numel() if isinstance(layer, GatedLayer) else layer.signs.numel() for layer in layers)
    biases = sum(layer.connection.after.channels for layer in layers)
    head = network.head(0)
    return 4 * (weights + biases + head.weight.numel() + head.bias.numel())


@pytest.mark.parametrize("method", ["hat", "sup"])
def test_a_cascade_halves_the_cost_of_twenty_tasks(method: str, report: Report, tmp_path: Path) -> None:
    run = random_run(resnet(method), MANY)
    few = int(SEEN)
    shares = []
    for precision in ("fp32", "int8"):
        contestants: dict[int | None, Callable[[], object]] = {}
        for candidates in (None, few, few + 1):
            folder = tmp_path / f"{precision} {candidates}"
            write_bundle(folder, run, [precision], candidates)
            model = BundleModel.load(folder, provider="cpu", precision=precision, threads=THREADS)
            one = model.bundle.golden.pixels[2:3]
            contestants[candidates] = lambda model=model, one=one: model.run(one)  # type: ignore[misc]
        taken = {candidates: found.wall for candidates, found in take_turns(contestants, ROUNDS).items()}
        # Every image is seen by a whole number of tasks, and more of them by the smaller one.
        fast = taken[few] + (SEEN - few) * (taken[few + 1] - taken[few])
        shares.append(note_cascade(report, f"resnet18 {method} {precision}", taken[None], fast))
    assert max(shares) <= SHARE_WITH_CASCADE


def note_cascade(report: Report, name: str, full: float, fast: float) -> float:
    report.add(f"{name}, {MANY} tasks with cascade", fast, "ms", full)
    print(f"\n{name}, {MANY} tasks: {full:.2f} ms without cascade, {fast:.2f} ms with it, {fast / full:.2f} of it")
    return fast / full


class Learned(NamedTuple):
    """Twenty tasks, exported with and without cascade, and images that they were not learned from."""

    full: Path
    cascaded: Path
    validation: Evidence
    test: NDArray[np.uint8]
    cascade: Cascade


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Learned]:
    folder = tmp_path_factory.mktemp("twenty")
    with guises_known():
        learn_twenty_tasks(folder / "run")
        run = open_run(folder / "run", choose_device())
        bundles = [folder / name for name in ("full", "cascaded")]
        for bundle, cascade in zip(bundles, ("off", "auto"), strict=True):
            _, manifest = export(folder / "run", bundle, precisions=("fp32", "int8"), cascade=cascade)
        test = guised_digits(PixelReader(run.config.preset.image)).test.pixels
        yield Learned(*bundles, gather(run), test, manifest.cascade)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_cascade_answers_as_the_full_evaluation_does(precision: str, learned: Learned, report: Report) -> None:
    cascade = learned.cascade
    assert cascade.seen is not None
    models = {
        name: BundleModel.load(folder, provider="cpu", precision=precision, threads=THREADS)
        for name, folder in (("without", learned.full), ("with", learned.cascaded))
    }
    sets = {"validation": learned.validation.pixels, "test": learned.test}
    agreeing = {name: agreement(models, pixels) for name, pixels in sets.items()}
    for name, share in agreeing.items():
        report.add(f"digits in guises {precision}, {name} images answered the same with cascade", share, "share", 1.0)
    described = ", ".join(f"{share:.2%} of {len(sets[name])} {name} images" for name, share in agreeing.items())
    print(
        f"\n\nat most {cascade.candidates} of {MANY} tasks, {cascade.seen:.2f} on average (margin {cascade.margin}), "
        f"see all rotations: {described} answered the same in {precision}"
    )
    contestants = {name: run_in_turn(model, sets["validation"]) for name, model in models.items()}
    taken = take_turns(contestants, 20 * ROUNDS)
    # A graph of 0.1 ms per task is mostly overhead, so this is reported and not asserted.
    note_cascade(report, f"digits in guises {precision}", taken["without"].wall, taken["with"].wall)
    assert cascade.seen <= SEEN
    if precision == "fp32":
        assert agreeing["validation"] >= AGREEING


def run_in_turn(model: BundleModel, pixels: NDArray[np.uint8]) -> Callable[[], Any]:
    """Runs the next image each time it is called."""
    numbers = cycle(range(len(pixels)))

    def run() -> Any:
        number = next(numbers)
        return model.run(pixels[number : number + 1])

    return run


def agreement(models: dict[str, BundleModel], pixels: NDArray[np.uint8]) -> float:
    """The share of images with the same class and the same "known"."""
    full, fast = (decide(run_graph(model.session, pixels), model.bundle.rule) for model in models.values())
    return float(((full.class_id == fast.class_id) & (full.known == fast.known)).mean())


@pytest.mark.parametrize("method", ["hat", "sup"])
def test_twenty_tasks_of_a_wide_network_are_exported_in_bounded_memory(method: str, report: Report) -> None:
    command = [sys.executable, "-m", export_memory.__name__, method, "128", str(MANY)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
    before, peak = map(float, done.stdout.split())
    report.add(f"{method}, {MANY} tasks of ResNet-18 at width 128, peak memory of an export", peak, "MB", MEGABYTES)
    print(f"\n{method}: {peak / 1024:.2f} GB at most, {before / 1024:.2f} of it before the export began")
    assert peak <= MEGABYTES
