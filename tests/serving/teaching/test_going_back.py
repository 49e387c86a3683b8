"""Going back to a version: labels follow, so that the next lesson changes nothing back. Real jobs, without a server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from serving.teaching import class_changes
from serving.teaching.class_changes import ChangedClasses
from serving.teaching.lesson_job import Wanted
from serving.teaching.teacher import Teacher
from tests.helpers_quarantine import arrival
from tests.helpers_teacher import finished, teacher_of
from tests.helpers_teaching import pictures

IMAGES = 8


@pytest.fixture
def teacher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Teacher]:
    with teacher_of(tmp_path, monkeypatch) as (made, _):
        yield made


def label(teacher: Teacher, name: str, count: int = IMAGES, first: int = 0) -> list[int]:
    added = teacher.store.add([arrival(content=content) for content in pictures(name, count, first=first)])
    teacher.store.teach(added.ids, name, teacher.current().labels, "ada")
    return list(added.ids)


def learn(teacher: Teacher) -> str:
    """The version that has learned all that is labelled."""
    finished(teacher, teacher.learn("ada", Wanted(), accept=True, force=True), "accepted")
    return teacher.current().version


def published(teacher: Teacher, changed: ChangedClasses) -> str:
    assert changed.job is not None
    finished(teacher, changed.job, "accepted")
    return teacher.current().version


def labels(teacher: Teacher) -> Counter[str | None]:
    return Counter(each.label for each in teacher.store.examples())


def pending(teacher: Teacher) -> tuple[Counter[str | None], int]:
    found = teacher.pending()
    return Counter(each.label for each in found.waiting), len(found.removed)


NOTHING: tuple[Counter[str | None], int] = (Counter(), 0)


def test_a_renamed_class_comes_back_with_its_labels(teacher: Teacher) -> None:
    foxes = label(teacher, "fox")
    first = learn(teacher)
    second = published(teacher, class_changes.rename(teacher, "bob", "fox", "vixen", accept=True))
    teacher.roll_back(first, "bob")
    assert (labels(teacher), pending(teacher)) == ({"fox": IMAGES}, NOTHING)
    assert {each.labelled_by for each in teacher.store.examples()} == {"ada"}
    teacher.roll_back(second, "bob")
    assert (labels(teacher), pending(teacher)) == ({"vixen": IMAGES}, NOTHING)
    # What the version has not learned keeps its label, and waits.
    label(teacher, "gnu", 3)
    teacher.roll_back(first, "bob")
    assert pending(teacher) == ({"gnu": 3}, 0)
    assert {each.id for each in teacher.store.examples("fox")} == set(foxes)


def test_a_deleted_class_comes_back_and_the_next_lesson_keeps_it(teacher: Teacher) -> None:
    label(teacher, "fox")
    first = learn(teacher)
    second = published(teacher, class_changes.delete(teacher, "bob", "fox", images=False, accept=True))
    assert labels(teacher) == {}
    teacher.roll_back(first, "bob")
    assert (labels(teacher), pending(teacher)) == ({"fox": IMAGES}, NOTHING)
    assert {each.labelled_by for each in teacher.store.examples()} == {"ada"}
    label(teacher, "gnu")
    learn(teacher)
    assert {"fox", "gnu"} <= set(teacher.current().labels)
    # The version without fox: it must not be learned again. What was taught since waits.
    teacher.roll_back(second, "bob")
    assert "fox" not in teacher.current().labels
    assert (labels(teacher), pending(teacher)) == ({"gnu": IMAGES}, ({"gnu": IMAGES}, 0))
    assert ("bob", "relabel", IMAGES, "fox") in [each[1:] for each in teacher.store.changes(100)]


def test_an_image_with_another_name_since_waits_with_it(teacher: Teacher) -> None:
    foxes = label(teacher, "fox")
    learn(teacher)
    without = published(teacher, class_changes.delete(teacher, "bob", "fox", images=False, accept=True))
    teacher.store.teach(foxes, "wolf", teacher.current().labels, "bob")
    learn(teacher)
    teacher.roll_back(without, "ada")
    assert (labels(teacher), pending(teacher)) == ({"wolf": IMAGES}, ({"wolf": IMAGES}, 0))


def test_merged_relabelled_and_removed_examples_come_back(teacher: Teacher) -> None:
    foxes, gnus = label(teacher, "fox"), label(teacher, "gnu")
    first = learn(teacher)
    merged = published(teacher, class_changes.merge(teacher, "bob", ["fox"], "gnu", accept=True))
    assert labels(teacher) == {"gnu": 2 * IMAGES}
    teacher.roll_back(first, "bob")
    assert (labels(teacher), pending(teacher)) == ({"fox": IMAGES, "gnu": IMAGES}, NOTHING)
    teacher.store.teach(foxes[:2], "gnu", teacher.current().labels, "bob")
    teacher.store.withdraw(gnus[:2], "bob")
    last = learn(teacher)
    for version, expected in (
        (first, {"fox": IMAGES, "gnu": IMAGES}),
        (merged, {"gnu": 2 * IMAGES}),
        (last, {"fox": IMAGES - 2, "gnu": IMAGES}),
    ):
        teacher.roll_back(version, "bob")
        assert (labels(teacher), pending(teacher)) == (expected, NOTHING)


def test_a_lesson_that_a_change_of_a_class_discards_is_in_the_log(teacher: Teacher) -> None:
    label(teacher, "fox")
    lesson = finished(teacher, teacher.learn("ada", Wanted()), "done")
    published(teacher, class_changes.rename(teacher, "bob", "ant", "emmet", accept=True))
    detail = f"job {lesson.id}: replaced by a later job"
    assert ("bob", "discard", 0, detail) in [each[1:] for each in teacher.store.changes(20)]


def test_a_class_that_is_merged_without_examples_begins_no_other(teacher: Teacher) -> None:
    teacher.store.begin_class("yeti", "ada")
    class_changes.merge(teacher, "ada", ["yeti"], "ant", accept=True)
    assert teacher.store.drafts() == {}
