"""The table of `make demo-teach`, and its exit code if a promise is broken."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from export import demo_teach
from export.demo import teach
from export.demo.teach import ENOUGH_REQUESTS, KNOWN, NEW, SOON_ENOUGH, TeachResult, compare
from export.demo.traffic import Traffic
from serving.http.schemas import Answer
from tests.helpers_serving import free_port

UNKNOWN, GROUPED = "both classes were unknown before", "both classes were found as groups"
RIGHT, KEPT, ANSWERED = (
    "at least 80% of them are right",
    "the other classes lose at most 1.5 points",
    "no request failed",
)
STEPS = {"learning": 3.0, "switching all workers": 0.4}


def answers(right: int, known: int, label: str) -> list[Answer]:
    """Ten answers for a class, of which some are right, and some are known."""
    made = [SimpleNamespace(label=label if n < right else "unknown", known=n < known) for n in range(10)]
    return cast("list[Answer]", made)


def all_answers(old: int, new: int) -> dict[str, list[Answer]]:
    counts = {**dict.fromkeys(KNOWN, old), **dict.fromkeys(NEW, new)}
    return {label: answers(count, count, label) for label, count in counts.items()}


GOOD: dict[str, Any] = {
    "before": all_answers(old=10, new=0),
    "after": all_answers(old=10, new=9),
    "groups": dict.fromkeys(NEW, 50),
    "steps": STEPS,
    "traffic": Traffic("", [], answers=[(0, answers(1, 1, "disc")[0])] * 330, seconds=10.0),
}


def test_the_table_shows_before_and_after(capsys: pytest.CaptureFixture[str]) -> None:
    result = compare(**GOOD)
    assert list(result.checks.values()) == [True] * 7
    assert result.rows == [
        ("of the six learned classes", "100% right, 100% known", "100% right, 100% known"),
        ("of ring", "0% right, 0% known", "90% right, 90% known"),
        ("of dots", "0% right, 0% known", "90% right, 90% known"),
        ("seconds from the click to the answer", "", "3.4"),
        ("  learning", "", "3.0"),
        ("  switching all workers", "", "0.4"),
        ("requests per second meanwhile, failed", "", "33, 0"),
    ]
    result.print()
    shown = capsys.readouterr().out
    assert "90% right, 90% known" in shown
    assert f"kept    {ANSWERED}" in shown
    assert "BROKEN" not in shown


@pytest.mark.parametrize(("changed", "broken"), [
    ({"before": all_answers(old=10, new=3)}, UNKNOWN),
    ({"groups": {"ring": 50}}, GROUPED),
    ({"after": all_answers(old=10, new=7)}, RIGHT),
    ({"after": all_answers(old=9, new=9)}, KEPT),
    ({"steps": {"learning": 10.0}}, SOON_ENOUGH),
    ({"traffic": replace(GOOD["traffic"], seconds=20.0)}, ENOUGH_REQUESTS),
    ({"traffic": replace(GOOD["traffic"], failures=["503"])}, ANSWERED),
])  # fmt: skip
def test_each_promise_can_be_broken(changed: dict[str, Any], broken: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = compare(**GOOD | changed)
    assert [promise for promise, kept in result.checks.items() if not kept] == [broken]
    result.print()
    assert f"BROKEN  {broken}" in capsys.readouterr().out


@pytest.mark.parametrize(("kept", "code"), [(True, 0), (False, 1)])
def test_a_broken_promise_is_an_exit_code(
    kept: bool, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = TeachResult(rows=[("of ring", "", "")], checks={ANSWERED: True, RIGHT: kept})
    monkeypatch.setattr(teach, "run_teach", lambda folder, port: result)
    assert demo_teach.main(["--out", str(tmp_path), "--port", str(free_port())]) == code


@pytest.mark.long
def test_the_whole_demonstration(tmp_path: Path) -> None:
    result = teach.run_teach(tmp_path / "demo", free_port())
    # How fast it is depends on what else the processors do.
    unmet = [promise for promise, kept in result.checks.items() if not kept]
    assert set(unmet) <= {SOON_ENOUGH, ENOUGH_REQUESTS}, result.rows
