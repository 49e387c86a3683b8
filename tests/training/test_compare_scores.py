"""Every decision on one run, side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from models.detectors import decisions
from serving.bundle.decision import Rule, TaskRule, judge
from tests.helpers import use_tiny_preset
from training import fit
from training.compare_scores import main as compare
from training.evaluate import main as evaluate
from training.measure.alternative_rules import TPL
from training.measure.comparison import BY_P_VALUE, by_p_value


@pytest.fixture(autouse=True)
def tiny_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    use_tiny_preset(monkeypatch)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run that keeps eight images, and one that keeps none."""
    folder = tmp_path_factory.mktemp("compared")
    with pytest.MonkeyPatch.context() as patch:
        use_tiny_preset(patch)
        for name, more in (("kept", ["--buffer", "8"]), ("none", [])):
            assert fit.main(["--out", str(folder / name), *more]) == 0
    return {name: folder / name for name in ("kept", "none")}


def printed(command: Any, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    assert command([*arguments, "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


def test_every_decision_has_a_row_equal_to_its_evaluation(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(runs["kept"])
    rows = {row["decision"]: row for row in printed(compare, capsys, run)["rows"]}
    assert list(rows) == [*decisions(), BY_P_VALUE, TPL]
    own = printed(evaluate, capsys, run)
    assert [name for name, row in rows.items() if row["chosen"]] == [own["decision"]]
    by_p_value = rows.pop(BY_P_VALUE)
    assert by_p_value["accepted"] == rows[own["decision"]]["accepted"]
    for name, row in rows.items():
        wanted = printed(evaluate, capsys, run, *(["--tp", TPL] if name == TPL else ["--decision", name]))
        assert row["cil"] == wanted["cil_accuracy"]
        assert row["accepted"] == wanted["accepted_known"]
        assert row["unknown_auroc"] == wanted["unknown"]["auroc"]


def test_without_kept_images_two_decisions_are_left_out(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = printed(compare, capsys, str(runs["none"]))["rows"]
    assert [row["decision"] for row in rows] == [*(name for name in decisions() if name != "paper+c"), BY_P_VALUE]
    assert evaluate([str(runs["none"]), "--tp", TPL]) == 2
    assert "this run stores no images of other tasks, which TPL needs" in capsys.readouterr().err


def test_tpl_takes_no_settings_of_others(runs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate([str(runs["kept"]), "--tp", TPL, "--corrected"]) == 2
    assert "--tp tpl has scores of its own" in capsys.readouterr().err


def test_images_of_another_data_set_are_the_unknown_ones(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run, other = str(runs["none"]), ("--unknown", "tiny", "anywhere")
    usual, measured = (printed(evaluate, capsys, run, *more) for more in ((), other))
    # Five images per class: all five classes count as unknown here.
    assert (usual["unknown_images"], measured["unknown_images"]) == (5, 25)
    assert measured["cil_accuracy"] == usual["cil_accuracy"]
    rows = {row["decision"]: row for row in printed(compare, capsys, run, *other)["rows"]}
    assert rows[measured["decision"]]["unknown_auroc"] == measured["unknown"]["auroc"] != usual["unknown"]["auroc"]
    assert evaluate([run, "--unknown", "nothing", "here"]) == 2
    assert "dataset is 'nothing'; allowed:" in capsys.readouterr().err


def test_a_table_and_a_plot(runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "scores.png"
    assert compare([str(runs["none"]), "--out", str(picture)]) == 0
    assert "(chosen)" in capsys.readouterr().out
    assert Image.open(picture).size > (300, 200)


def test_a_missing_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare([str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_the_task_with_the_largest_p_value_wins() -> None:
    # Task 0 accepts distances up to 100, task 1 up to 1: at 50 and 2, task 0 is likelier although task 1 is nearer.
    rule = Rule(tasks=(TaskRule.fit(np.arange(100.0), 2), TaskRule.fit([0.0, 1.0], 1)))
    outputs = {"logits": np.array([[0.0, 1.0, 5.0]]), "distances": np.array([[60.0, 50.0, 2.0]])}
    verdicts = judge(outputs, rule)
    assert (verdicts.task.tolist(), verdicts.class_id.tolist()) == ([1], [2])
    decided = by_p_value(verdicts, rule)
    assert (decided.task.tolist(), decided.class_id.tolist()) == ([0], [1])


def test_several_runs_have_one_table_of_means_and_spread(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [str(runs["kept"]), str(runs["none"])]
    every = [printed(compare, capsys, folder)["rows"] for folder in folders]
    assert compare([*folders, "--out", str(tmp_path / "plot.png")]) == 0
    assert Image.open(tmp_path / "plot.png").size[0] > 100
    header, _, first, *lines = capsys.readouterr().out.splitlines()
    assert header.startswith("| decision | CIL % | TP % |")
    chosen = [100 * row["cil"] for rows in every for row in rows if row["chosen"]]
    assert first.startswith(f"| the run's choice | {np.mean(chosen):.2f} ± {np.std(chosen, ddof=1):.2f} |")
    assert any(line.startswith(f"| {TPL} (1 of 2 runs) | ") for line in lines)
    assert compare([*folders, "--json"]) == 0
    assert [each["rows"] for each in json.loads(capsys.readouterr().out)] == every
