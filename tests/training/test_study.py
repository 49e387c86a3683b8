"""`openworld study` on photographs, whose options it passes to `openworld fit`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from models.trunks.cache_settings import FOLDER_VARIABLE
from tests.helpers_photos import write_photos
from training import study
from training.learn import fitting
from training.store.checkpoint import read_config


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")[1:-1]]


def rows_of(printed: str) -> list[dict[str, str]]:
    lines = printed.split("\n\n")[0].splitlines()
    return [dict(zip(cells_of(lines[0]), cells_of(line), strict=True)) for line in lines[2:]]


BASELINES = [
    *("nearest mean", "Gaussians on encoded vectors", "Gaussians, random projection"),
    "Gaussians, PCA of the first task",
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "cache"))


def test_baselines_of_photos_are_those_of_their_encoded_vectors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    photos = write_photos(tmp_path / "photos", disc=4, stripes=4, checks=4, triangle=4)
    words = ["--trunk", "efficientnet-lite0", "--size", "64", "--classes-per-task", "2", "--data", str(photos)]
    assert study.main([*words, "--seeds", "0", "--baselines", "--out", str(tmp_path / "none")]) == 0
    assert [row["prediction"] for row in rows_of(capsys.readouterr().out)] == BASELINES
    assert not (tmp_path / "none").exists()


def test_a_folder_of_photos_is_studied_with_a_trunk(tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos", disc=2, stripes=2)
    chosen = study.make_parser().parse(["--data", str(photos)])
    assert study.Studied.of(chosen).preset == "photos"
    assert study.Studied.of(study.make_parser().parse(["--data", str(photos), "--trunk", "none"])).preset == "digits"
    assert study.Studied.of(study.make_parser().parse([])).preset == "digits"


@pytest.mark.long
def test_the_study_of_photos_has_rows_for_baselines_and_statistics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fitting, "write_page", lambda *_: None)
    photos, out = write_photos(tmp_path / "photos", disc=8, stripes=8, checks=8, triangle=8), tmp_path / "study"
    words = ["--preset", "photos", "--data", str(photos), "--seeds", "0", "--out", str(out)]
    words += ["--trunk", "efficientnet-lite0", "--size", "64", "--tasks", "disc,checks; stripes,triangle", "--quick"]
    assert study.main(words) == 0
    rows = rows_of(capsys.readouterr().out)
    assert [row["prediction"] for row in rows] == [*BASELINES, "served"]
    assert all(float(row["CIL %"].partition(" ")[0]) > 50 for row in rows)
    (run,) = out.iterdir()
    config = read_config(run)
    assert config.tasks == (("disc", "checks"), ("stripes", "triangle"))
    assert config.trunk is not None
    assert (config.trunk.name, config.trunk.size, config.quick) == ("efficientnet-lite0", 64, True)
    assert json.loads((run / "metrics.json").read_text())["cil_accuracy"] > 0.5


def of(*words: str) -> study.Studied:
    return study.Studied.of(study.make_parser().parse(list(words)))


def test_options_are_passed_to_new_runs_and_tell_runs_apart() -> None:
    assert not of().has_trunk
    assert of().words() == ["--preset", "digits"]
    assert of("--trunk", "none", "--preset", "images").words() == ["--preset", "images", "--trunk", "none"]
    assert not of("--trunk", "none", "--preset", "images").has_trunk
    one = of("--trunk", "onnx:some/file.onnx", "--size", "96", "--classes-per-task", "2", "--trunk-weights", "w.bin")
    assert one.words() == [
        *("--preset", "photos", "--trunk", "onnx:some/file.onnx", "--size", "96", "--classes-per-task", "2")
    ]
    assert one.places == ["--trunk-weights", "w.bin"]
    assert one.has_trunk
    assert one.words(joint=True)[-2:] == list(study.EVERY_CLASS)
    assert one.words(joint=True).count("--classes-per-task") == 1
    tasks = of("--tasks", '"a, b",c; d')
    assert tasks.words(joint=True) == ["--preset", "digits", "--tasks", '"a, b", "c", "d"']
    names = [each.name for each in (of(), one, tasks, of("--tasks", "a; b"), of("--trunk", "efficientnet-lite2"))]
    assert len(set(names)) == len(names)
    assert "/" not in one.name


def test_adapters_without_adapters_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert study.main(["--quick", "--methods", "hat", "--out", str(tmp_path / "study")]) == 2
    assert "--quick has no adapters: got --methods hat; allowed: pooled" in capsys.readouterr().err
