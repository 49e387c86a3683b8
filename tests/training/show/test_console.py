"""The progress output of a run while it trains."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest
from rich.console import Console

from serving.bundle.run_verdict import PARTS, not_measured
from tests.helpers import use_tiny_preset
from training import fit
from training.measure.metrics import forgetting_in_words
from training.show.console import OVER_TIME, QUIET_SECONDS, UNLIMITED, Reporter, over_time_table, print_summary
from training.store.checkpoint import METRICS


class Clock:
    """A clock that only advances when a test sets it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def lines_of_a_phase(capsys: pytest.CaptureFixture[str], seconds: list[float], *, terminal: bool = False) -> list[str]:
    """The lines printed while epochs of these durations are trained, up to the first line of the bar itself."""
    clock = Clock()
    reporter = Reporter(clock)
    if terminal:
        reporter.console = Console(stderr=True, force_terminal=True, width=120)
    with reporter.bar("task 0 (a, b): features", 0, len(seconds)) as advance:
        for epoch, each in enumerate(seconds):
            clock.now += each
            advance(2.0 - epoch)
        return capsys.readouterr().err.splitlines()


def test_without_a_terminal_a_long_phase_prints_a_line_about_every_minute(capsys: pytest.CaptureFixture[str]) -> None:
    lines = lines_of_a_phase(capsys, [QUIET_SECONDS / 2] * 5)
    times, texts = zip(*(line.split(" ", 1) for line in lines), strict=True)
    assert texts == ("task 0 (a, b): features 2/5 loss 1.000", "task 0 (a, b): features 4/5 loss -1.000")
    assert all(re.fullmatch(r"\d\d:\d\d:\d\d", each) for each in times)


def test_a_short_phase_prints_nothing_before_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    # The bar itself shows the last epoch.
    assert lines_of_a_phase(capsys, [1.0, 2.0, QUIET_SECONDS]) == []


def test_on_a_terminal_the_bar_is_enough(capsys: pytest.CaptureFixture[str]) -> None:
    lines = lines_of_a_phase(capsys, [QUIET_SECONDS] * 3, terminal=True)
    assert "task 0 (a, b): features 1/3 loss 2.000" not in lines
    assert any("features" in line for line in lines)


def test_what_takes_long_after_the_epochs_is_announced(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    use_tiny_preset(monkeypatch)
    with caplog.at_level(logging.INFO):
        assert fit.main(["--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().err
    assert "task 0 (zero, one): fitting its detectors to 12 images\n" in printed
    assert "task 1 (two, three): fitting its detectors to 12 images\n" in printed
    assert "measuring on 20 test images of learned classes and 5 unknown ones ..." in caplog.text


def test_the_table_over_time_fits_into_80_columns_with_the_widest_numbers() -> None:
    table = over_time_table([dict.fromkeys(OVER_TIME, 1.0)] * 20)
    assert Console(width=UNLIMITED).measure(table).maximum <= 80


@pytest.mark.parametrize(("tasks", "shown"), [(3, True), (20, False)])
def test_a_matrix_too_wide_for_the_terminal_is_only_in_the_report(
    tasks: int, shown: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    accuracies = {
        "cil_accuracy": 0.5,
        "til_accuracy": 0.9,
        "tp_accuracy": 0.6,
        "forgetting_within_tasks": 0.0,
        "lost_to_newer_classes": 0.1,
        "accepted_known": 0.9,
        "accepted_known_lowest": 0.625,
        "rejected_unknown": None,
    }
    print_summary(
        {
            **accuracies,
            **dict.fromkeys(("average_incremental_accuracy", "ece", "accepted_known", "task_auroc"), 0.5),
            "verdict": not_measured("no images").model_dump(),
            "forgetting_in_words": forgetting_in_words(changes_with_tasks=False),
            "method": "hat",
            "loss": "csi",
            "preset": "digits",
            "seed": 0,
            "prediction": "served",
            "unknown": None,
            "parameters": {"inference": 10, "per_task": [1]},
            "memory": {"detectors_bytes": 790_000},
            "memory_in_words": "numbers",
            "after_each_task": [accuracies] * tasks,
            "accuracy_matrix": [[0.125] * (task + 1) for task in range(tasks)],
        }
    )
    printed = capsys.readouterr().out
    assert ("12.5" in printed) is shown
    assert printed.count("62.5") == tasks
    assert ("each of the 20 tasks after each of them: see report.html" in printed) is not shown
    assert "…" not in printed


def test_the_verdict_is_printed_with_its_numbers_and_what_would_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "240")
    use_tiny_preset(monkeypatch)
    assert fit.main(["--out", str(tmp_path)]) == 0
    verdict = json.loads((tmp_path / METRICS).read_text())["verdict"]
    printed = capsys.readouterr().out
    for name, title in PARTS.items():
        (row,) = [line for line in printed.splitlines() if title in line]
        assert verdict[name]["grade"] in row
        assert verdict[name]["numbers"] in row
        assert verdict[name]["advice"] in printed
    assert "TP" in verdict["tp"]["numbers"]


def test_one_bar_covers_a_run_that_was_estimated(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    reporter = Reporter(clock)
    reporter.expect({"encoding": 30.0, "task 0": 50.0, "task 1": 20.0})
    with reporter.counter("encoding with a trunk", 4) as advance:
        advance(2)
        clock.now += QUIET_SECONDS
        advance(1)
    with reporter.phase("task 0 (a, b): statistics"):
        pass
    with reporter.phase("a phase that was not estimated"):
        clock.now += QUIET_SECONDS
    with reporter.counter("task 1 (c, d): statistics", 1) as advance:
        advance(1)
    lines = [line.split(" ", 1)[1] for line in capsys.readouterr().err.splitlines() if "of the run, " in line]
    # Three quarters of 30 of 100 seconds; then these, the first task, and the second.
    assert [line.partition(" of the run")[0] for line in lines] == [
        "encoding with a trunk 3/4, 22 %",
        "task 1 (c, d): statistics, 92 %",
    ]
    reporter.end()
    reporter.end()
