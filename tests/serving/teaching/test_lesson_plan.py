"""Which part of what waits a lesson learns, and real lessons with classes that have too few examples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from serving import errors
from serving.quarantine.records import Example
from serving.teaching.api.views import job_view, status_view
from serving.teaching.lesson_job import Wanted
from serving.teaching.lesson_plan import plan_lesson
from serving.teaching.teacher import Teacher
from tests.helpers_quarantine import arrival
from tests.helpers_teacher import finished, teacher_of
from tests.helpers_teaching import pictures


@pytest.fixture
def teacher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Teacher]:
    with teacher_of(tmp_path, monkeypatch) as (made, _):
        yield made


def label(teacher: Teacher, name: str, count: int, first: int = 0) -> list[int]:
    added = teacher.store.add([arrival(content=content) for content in pictures(name, count, first=first)])
    teacher.store.teach(added.ids, name, teacher.current().labels, "ada")
    return list(added.ids)


def learn(teacher: Teacher) -> dict[str, tuple[int, int]]:
    """The examples that a lesson has added and taken out, by class."""
    job = finished(teacher, teacher.learn("ada", Wanted(), accept=True, force=True), "accepted")
    learned = job_view(job).learned
    assert learned is not None
    return {each.label: (each.added, each.removed) for each in learned.classes}


def short(teacher: Teacher) -> list[tuple[str, int, int, bool]]:
    found = status_view(teacher, teacher.current(), "ada", auto=False).too_few
    return [(each.label, each.images, each.missing, each.learned) for each in found]


def waiting(teacher: Teacher) -> Counter[str | None]:
    return Counter(each.label for each in teacher.pending().waiting)


def example(digest: str, name: str) -> Example:
    return Example(1, digest, name, "named", "ada", 0.0, 100)


def planned(taught: str, gone: str, fresh: str) -> tuple[str, str, list[str]]:
    """Each example is a letter and the first letter of its class; ant is a class of the run."""
    names = {"a": "ant", "e": "elk", "f": "fox", "g": "gnu"}

    def read(text: str) -> dict[str, str]:
        return {each[0]: names[each[1]] for each in text.split()}

    plan = plan_lesson(read(taught), gone.split(), [example(*each) for each in read(fresh).items()], ["ant"])
    added = " ".join(f"{each.digest}{str(each.label)[0]}" for each in plan.fresh)
    kept = [f"{each.label} {each.images} {'stays' if each.learned else 'waits'}" for each in plan.short]
    return added, " ".join(sorted(plan.gone)), kept


def test_what_is_learned_of_what_waits() -> None:
    assert planned("", "", "1e 2e 3f") == ("1e 2e", "", ["fox 1 waits"])
    # A class of the run needs none.
    assert planned("", "", "1a") == ("1a", "", [])
    # Of a taught class, one would be left: it stays as it is.
    assert planned("1e 2e 3e", "1 2", "4f 5f") == ("4f 5f", "", ["elk 1 stays"])
    # None is left, so that the class is deleted; or there are others now.
    assert planned("1e 2e", "1 2", "4f 5f") == ("4f 5f", "1 2", [])
    assert planned("1e 2e", "1", "3e") == ("3e", "1", [])
    # Both have another name now: a class that stays keeps them, so that the other one has too few.
    assert planned("1e 2e 3e", "1 2", "1f 2f 4a") == ("4a", "", ["elk 1 stays"])
    assert planned("1e 2e 3e", "1 2", "1f 2f 4f 5g") == ("", "", ["elk 1 stays", "fox 1 waits", "gnu 1 waits"])
    assert planned("1e 2e", "1", "1e") == ("1e", "1", [])


def test_a_stray_image_does_not_block_the_other_classes(teacher: Teacher) -> None:
    label(teacher, "elk", 6)
    (stray,) = label(teacher, "yak", 1)
    assert short(teacher) == [("yak", 1, 1, False)]
    assert learn(teacher) == {"elk": (6, 0)}
    job = teacher.jobs.latest()
    assert job is not None
    learned = job_view(job).learned
    assert learned is not None
    assert [(each.label, each.missing) for each in learned.too_few] == [("yak", 1)]
    assert "yak" not in teacher.current().labels
    assert waiting(teacher) == {"yak": 1}
    # Only this is left, so nothing can be learned.
    assert not status_view(teacher, teacher.current(), "ada", auto=False).ready
    with pytest.raises(errors.NothingToLearnError, match="'yak' has 1 of 2 examples"):
        teacher.learn("ada", Wanted())
    assert teacher.jobs.latest() == job
    more = label(teacher, "yak", 1, first=9)
    assert short(teacher) == []
    assert learn(teacher) == {"yak": (2, 0)}
    assert {each.id for each in teacher.store.examples("yak")} == {stray, *more}


def test_a_class_with_too_few_examples_left_stays_and_does_not_block_the_others(teacher: Teacher) -> None:
    elks = label(teacher, "elk", 6)
    learn(teacher)
    teacher.store.withdraw(elks[1:], "ada")
    assert short(teacher) == [("elk", 1, 1, True)]
    label(teacher, "fox", 6)
    assert learn(teacher) == {"fox": (6, 0)}
    assert (teacher.images()["elk"], teacher.images()["fox"]) == (6, 6)
    assert len(teacher.pending().removed) == 5, "they still wait to be taken out"
    # With one more, the class has enough: what is left of it is learned again with it.
    label(teacher, "elk", 1, first=9)
    assert learn(teacher) == {"elk": (1, 5)}
    assert teacher.images()["elk"] == 2
    assert (waiting(teacher), teacher.pending().removed, short(teacher)) == ({}, (), [])


def test_a_class_that_was_extended_may_lose_its_first_examples(teacher: Teacher) -> None:
    elks = label(teacher, "elk", 6)
    learn(teacher)
    label(teacher, "elk", 5, first=9)
    assert learn(teacher) == {"elk": (5, 0)}
    teacher.store.withdraw(elks[1:], "ada")
    assert short(teacher) == []
    assert learn(teacher) == {"elk": (0, 5)}
    assert teacher.images()["elk"] == 6
