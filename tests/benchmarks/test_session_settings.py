"""onnxruntime's settings on one image, changed one at a time: the chosen ones and the rejected ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnxruntime as ort

from serving.bundle.decision import OUTPUT_NAMES
from serving.bundle.manifest import INPUT_NAME, load_bundle
from serving.bundle.session import open_session, session_options
from tests.benchmarks.conftest import Report, table
from tests.benchmarks.exported import random_run, resnet, write_bundle
from tests.benchmarks.timing import take_turns
from training.presets import PRESETS

ROUNDS = 40
THREADS = 2
CHOSEN = "as chosen, 2 threads"
PAUSE = 0.03
"""Seconds to wait: spinning threads continue after a run and would slow down the next contestant."""
Level = ort.GraphOptimizationLevel


def one_thread(options: ort.SessionOptions) -> None:
    options.intra_op_num_threads = 1


def no_spinning(options: ort.SessionOptions) -> None:
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")


def spinning_for(microseconds: int) -> Callable[[ort.SessionOptions], None]:
    def change(options: ort.SessionOptions) -> None:
        options.add_session_config_entry("session.intra_op.spin_duration_us", str(microseconds))

    return change


def no_arena(options: ort.SessionOptions) -> None:
    options.enable_cpu_mem_arena = False


def no_pattern(options: ort.SessionOptions) -> None:
    options.enable_mem_pattern = False


def level(wanted: ort.GraphOptimizationLevel) -> Callable[[ort.SessionOptions], None]:
    def change(options: ort.SessionOptions) -> None:
        options.graph_optimization_level = wanted

    return change


def parallel(options: ort.SessionOptions) -> None:
    """Tasks side by side instead of one task on all threads."""
    options.execution_mode = ort.ExecutionMode.ORT_PARALLEL
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = THREADS


CHANGES: dict[str, Callable[[ort.SessionOptions], None]] = {
    CHOSEN: lambda options: None,
    "1 thread": one_thread,
    "threads do not spin": no_spinning,
    "threads spin for 50 microseconds": spinning_for(50),
    "threads spin for 20 ms": spinning_for(20_000),
    "no arena": no_arena,
    "no memory pattern": no_pattern,
    "graph level extended (no layout)": level(Level.ORT_ENABLE_EXTENDED),
    "graph level basic": level(Level.ORT_ENABLE_BASIC),
    "tasks in parallel, 1 thread each": parallel,
}


def test_session_settings(report: Report, tmp_path: Path) -> None:
    runs = {"digits": random_run(PRESETS["digits"].network, 4), "resnet18": random_run(resnet("hat"), 5)}
    columns = []
    for name, run in runs.items():
        for precision in ("fp32", "int8"):
            folder = tmp_path / name / precision
            write_bundle(folder, run, [precision])
            contestants = {setting: contestant(folder, precision, change) for setting, change in CHANGES.items()}
            taken = take_turns(contestants, ROUNDS * (2 if name == "digits" else 1), pause=PAUSE)
            for setting, each in taken.items():
                label = f"{name} {precision}, {setting}"
                report.add(f"{label}, one image", each.wall, "ms", taken[CHOSEN].wall)
                report.add(f"{label}, processor time", each.processor, "ms", taken[CHOSEN].processor)
            columns.append((f"{name} {precision}", taken))
    rows = [
        (setting, *(f"{taken[setting].wall:.2f} ({taken[setting].processor:.2f})" for _, taken in columns))
        for setting in CHANGES
    ]
    head = ("ms an image (processor time)", *(name for name, _ in columns))
    print(f"\n\n{table(head, rows)}")


def contestant(folder: Path, precision: str, change: Callable[[ort.SessionOptions], None]) -> Callable[[], object]:
    bundle, options = load_bundle(folder), session_options(THREADS)
    change(options)
    session = open_session(bundle.graph(precision), options)
    one = bundle.golden.pixels[2:3]
    return lambda: session.run(list(OUTPUT_NAMES), {INPUT_NAME: one})
