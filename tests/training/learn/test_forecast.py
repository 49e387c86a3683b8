"""What is announced before a run with a trunk begins covers what it then does."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from rich.console import Console

from models.trunks.cache_settings import FOLDER_VARIABLE
from models.trunks.trunk import open_trunk
from serving.bundle.pooled import ChoiceMemory, Statistics, learn_task, projection_for
from serving.bundle.pooled.cholesky import Triangle
from tests.helpers import raise_at_call
from tests.helpers_photos import write_photos
from training import fit
from training.data.encoder import Encoder
from training.learn import own_trunk, pooled_learner
from training.learn.forecast import Expected, Photos, announce, multiplications
from training.learn.photos import photos_preset
from training.show import console
from training.show.whole_run import WholeRun

WORDS = ["--size", "64", "--epochs", "1", "--width", "16", "--batch-size", "16"]


class Followed(WholeRun):
    """Remembers which phases began and which were never reached."""

    every: list[Followed]

    def __init__(self, console: Console, phases: Mapping[str, float]) -> None:
        super().__init__(console, phases)
        self.expected, self.begun, self.estimated = dict(phases), list[str](), list[float]()
        self.every.append(self)

    def begin(self, name: str) -> float:
        seconds = super().begin(name)
        self.begun.append(name)
        self.estimated.append(seconds)
        return seconds

    @property
    def adapters(self) -> set[int]:
        """The tasks of which an adapter was expected."""
        return {int(found[1]) for name in self.expected if (found := re.match(r"adapter of task (\d+)", name))}

    def learned(self) -> None:
        """Check that all of what was learned was expected, and all of what was expected to be learned was."""
        of_tasks = "task ", "adapter of task "
        unexpected = [
            name
            for name, seconds in zip(self.begun, self.estimated, strict=True)
            if name.startswith(of_tasks) and not seconds
        ]
        assert not unexpected
        began = tuple(self.begun)
        expected = [name for name in self.expected if name.startswith(of_tasks)]
        assert expected
        assert not [name for name in expected if not any(each.startswith(name) for each in began)]


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Followed]:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(Followed, "every", [], raising=False)
    monkeypatch.setattr(console, "WholeRun", Followed)
    return Followed.every


@pytest.mark.long
def test_the_bar_covers_new_added_and_resumed_tasks(
    followed: list[Followed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    photos, run = write_photos(tmp_path / "photos", disc=8, stripes=8, checks=8, triangle=8, ring=8), tmp_path / "run"
    assert fit.main(["--data", str(photos), "--tasks", "disc,stripes", "--out", str(run), *WORDS]) == 0
    assert fit.main(["--out", str(run), "--add-task", "checks,triangle"]) == 0
    with pytest.MonkeyPatch.context() as patch:
        raise_at_call(patch, pooled_learner, "learn_task", 1)
        with pytest.raises(OSError, match="learn_task died"):
            fit.main(["--out", str(run), "--add-task", "ring"])
    assert fit.main(["--out", str(run), "--resume"]) == 0
    assert [each.adapters for each in followed] == [{0}, {1}, {2}, {2}]
    for each in followed[:2]:
        each.learned()
    # What was learned before the end is not learned again.
    assert followed[3].begun == ["adapter of task 2, head", "task 2 (ring): statistics of 7 photos", "measuring"]
    assert min(followed[3].estimated) > 0
    announced = [line for line in capsys.readouterr().err.splitlines() if "expected: about" in line]
    assert len(announced) == 4
    assert all("for more views and about" in line and "to learn adapters" in line for line in announced)


def test_the_tasks_that_are_announced_have_their_numbers(followed: list[Followed], tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos", disc=4, stripes=4)
    trunk, reporter = open_trunk("efficientnet-lite0", size=64), console.Reporter()
    expected = Expected(2, 4, photos_preset(trunk.spec, width=16), 0, quick=False, first=4)
    announce(Encoder(trunk), reporter, Photos.inside([str(photos)]), expected)
    for name in ("task 4 (a, b): statistics", "adapter of task 5, features", "views of task 4, turned"):
        with reporter.phase(name):
            pass
    reporter.end()
    assert followed[0].adapters == {4, 5}
    assert min(followed[0].estimated[:2]) > 0
    assert {"views of task 4, turned", "task 5 ("} <= {*followed[0].expected}


def test_the_phases_of_task_1_are_not_those_of_task_10(followed: list[Followed]) -> None:
    reporter = console.Reporter()
    reporter.expect({"task 1 (": 3.0, "task 10 (": 5.0})
    with reporter.phase("task 10 (a): statistics"):
        pass
    reporter.end()
    assert followed[0].estimated == [5.0]


def test_the_filters_of_a_trunk_are_announced_before_any_photo_is_read(
    followed: list[Followed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    photos = write_photos(tmp_path / "photos", disc=3, stripes=3)
    raise_at_call(monkeypatch, own_trunk, "load_source", 1)
    words = ["--data", str(photos), "--trunk", "patches", "--trunk-option", "count=20", "--classes-per-task", "1"]
    with pytest.raises(OSError, match="load_source died"):
        fit.main([*words, "--out", str(tmp_path / "run")])
    printed = capsys.readouterr().err
    assert "6 photos: filters are learned from those of the first task, patches encodes each once" in printed
    assert "to learn the filters of the trunk" in printed
    assert {"reading images", "learning filters", "encoding", "task 0 (", "task 1 ("} <= {*followed[0].expected}
    assert min(followed[0].expected.values()) > 0


def test_a_benchmark_is_announced_without_a_folder(
    followed: list[Followed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is encoded, although its images are not in class folders."""
    monkeypatch.setattr(Encoder, "read", lambda *_: pytest.fail("announced too late") if not followed else stop())

    def stop() -> None:
        raise OSError("encoding began")

    with pytest.raises(OSError, match="encoding began"):
        fit.main(
            ["--preset", "digits", "--trunk", "efficientnet-lite0", "--size", "32", "--quick", "--out", str(tmp_path)]
        )
    assert "1797 photos: efficientnet-lite0 encodes each once" in capsys.readouterr().err
    assert [name for name in followed[0].expected if name.startswith("task ")] == [f"task {n} (" for n in range(4)]


def test_the_forecast_counts_the_systems_of_equations_that_are_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of them are of the vectors without their expansion."""
    sizes, of = list[int](), Triangle.of

    def counted(matrix: NDArray[np.float64]) -> Triangle:
        sizes.append(len(matrix))
        return of(matrix)

    monkeypatch.setattr(Triangle, "of", counted)
    projection, ids = projection_for(128), np.repeat([0, 1], 10)
    vectors = np.random.default_rng(0).normal(size=(20, 128)) + 3 * ids[:, None]
    learn_task(Statistics(projection), ChoiceMemory(), vectors, ids, 0)
    assert multiplications(projection, 0) == pytest.approx(sum(size**3 / 3 for size in sizes))
    assert multiplications(projection, 50) > multiplications(projection, 0)
