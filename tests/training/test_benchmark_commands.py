"""Every benchmark that the documents name starts with the arguments that they name, here on tiny runs."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from models.trunks.cache_settings import FOLDER_VARIABLE
from tests.benchmarks import (
    acceptance,
    digit_settings,
    own_acceptance,
    refit,
    shared_scores,
    small_changes,
    task_forms,
)
from tests.helpers import tiny_source, use_tiny_preset
from tests.helpers_photos import write_photos
from tests.helpers_serving import ROOT
from training import fit
from training.data.datasets import SOURCES
from training.store.checkpoint import METRICS

Start = Callable[..., str]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Start:
    """Start a benchmark with arguments; returns what it prints."""
    use_tiny_preset(monkeypatch)
    # The setting `default` is the tiny preset, of which a run is there already.
    monkeypatch.setitem(SOURCES, "digits", tiny_source)
    monkeypatch.setitem(digit_settings.SETTINGS, "default", digit_settings.Setting(tiny_source))

    def do(module: Any, *arguments: str) -> str:
        monkeypatch.setattr("sys.argv", [module.__name__, *arguments])
        capsys.readouterr()
        module.main()
        return capsys.readouterr().out

    return do


@pytest.fixture
def folder(tiny_hat: Path, tmp_path: Path) -> Path:
    """A folder with the run of a setting."""
    shutil.copytree(tiny_hat, digit_settings.place_of("default", 0, "hat", tmp_path))
    return tmp_path


def test_benchmarks_of_settings_start(start: Start, folder: Path) -> None:
    printed = start(digit_settings, "default", "--seed", "0", "--out", str(folder))
    assert "default, hat, seed 0, decision " in printed
    assert "CIL of each class: zero " in printed
    printed = start(task_forms, "--out", str(folder), "--seed", "0", "--setting", "default")
    for form in task_forms.FORMS:
        assert printed.count(f"\n{form:24} ") == 2
    printed = start(shared_scores, "--out", str(folder), "--setting", "default", "--seed", "0")
    assert [line.split()[0] for line in printed.splitlines()[-5:]] == [str(weight) for weight in shared_scores.WEIGHTS]


def test_benchmarks_of_runs_start(start: Start, tiny_hat: Path, tmp_path: Path) -> None:
    measured = json.loads((tiny_hat / METRICS).read_text())
    printed = start(small_changes, str(tiny_hat))
    unchanged = next(line for line in printed.splitlines() if line.startswith("unchanged")).split()
    assert unchanged[1:] == [f"{100 * (1 - measured['accepted_known']):.1f}", f"{100 * measured['cil_accuracy']:.1f}"]
    assert "validation by left-out" in start(acceptance, str(tiny_hat))
    printed = start(refit, str(tiny_hat), str(tmp_path / "new"), "--strength", "0")
    assert "task 1: " in printed
    assert (tmp_path / "new" / METRICS).exists()
    assert "| 200 | " in start(own_acceptance, "--draws", "2")


def test_changes_of_photos_are_measured_and_other_benchmarks_refuse_them(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "cache"))
    photos, run = write_photos(tmp_path / "photos", disc=10, stripes=10, ring=5), tmp_path / "run"
    how = ("--trunk", "patches", "--trunk-option", "count=20", "--tasks", "disc; stripes", "--quick")
    assert fit.main(["--data", str(photos), "--out", str(run), *how]) == 0
    measured = json.loads((run / METRICS).read_text())
    rows = {line[:28].strip(): line[28:].split() for line in start(small_changes, str(run)).splitlines()}
    known = [f"{100 * (1 - measured['accepted_known']):.1f}", f"{100 * measured['cil_accuracy']:.1f}"]
    assert rows["unchanged"] == known
    assert rows["never learned"][0] == f"{100 * measured['unknown']['rejected_unknown']:.1f}"
    assert {*small_changes.CHANGES} < {*rows}
    for module, more in ((acceptance, []), (refit, [str(tmp_path / "new")])):
        with pytest.raises(SystemExit, match=r"^error: .* is not available for this run: it decides by statistics"):
            start(module, str(run), *more)
    assert not (tmp_path / "new").exists()


def test_every_benchmark_that_documents_name_is_there() -> None:
    documents = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    named = {name for path in documents for name in re.findall(r"tests\.benchmarks\.(\w+)", path.read_text())}
    for name in named:
        assert (ROOT / "tests" / "benchmarks" / f"{name}.py").exists(), name
