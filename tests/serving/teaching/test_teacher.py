"""Changes of classes, learning without a person, and an object store: real jobs on a real store, without a server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from serving import errors
from serving.bundle.shelf import Shelf
from serving.quarantine.records import UnknownIdError
from serving.settings import Settings
from serving.teaching import class_changes
from serving.teaching.auto import Autonomy
from serving.teaching.lesson_job import Wanted
from serving.teaching.teacher import Teacher, described
from tests.helpers_quarantine import arrival
from tests.helpers_teacher import finished, teacher_of
from tests.helpers_teaching import pictures

IMAGES = 8


@pytest.fixture
def teacher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Teacher]:
    # An object store, as far as the code is concerned: all files are written and read through fsspec.
    with teacher_of(tmp_path, monkeypatch, OPENWORLD_QUARANTINE_IMAGES=f"local://{tmp_path}/bucket") as (made, _):
        yield made


def label(teacher: Teacher, name: str, first: int = 0) -> list[int]:
    added = teacher.store.add([arrival(content=content) for content in pictures(name, IMAGES, first=first)])
    teacher.store.teach(added.ids, name, teacher.current().labels, "ada")
    return list(added.ids)


def labels_of(teacher: Teacher) -> dict[int, str | None]:
    return {each.id: each.label for each in teacher.store.examples()}


def test_delete_merge_and_rename_change_nothing_unless_they_succeed(teacher: Teacher) -> None:
    elks = label(teacher, "elk")
    finished(teacher, teacher.learn("ada", Wanted(), accept=True), "accepted")
    foxes, before, base = label(teacher, "fox"), labels_of(teacher), teacher.current().version
    # Refused, because another job runs.
    running = teacher.jobs.start("learn", "bob", base, {})
    with pytest.raises(errors.TeachBusyError, match="of bob"):
        class_changes.delete(teacher, "ada", "elk", images=True, accept=True)
    with pytest.raises(errors.TeachBusyError, match="of bob"):
        class_changes.merge(teacher, "ada", ["elk", "fox"], "dog", accept=True)
    assert (labels_of(teacher), teacher.current().version) == (before, base)
    teacher.jobs.fail(running.id, "ended")
    # Failed: a class of the run cannot be merged, so that the examples of the other one keep their label.
    failed = class_changes.merge(teacher, "ada", ["fox", "ant"], "bee", accept=True)
    assert failed.job is not None
    assert "learned by a run" in str(finished(teacher, failed.job).error)
    assert (labels_of(teacher), teacher.current().version) == (before, base)
    # Discarded.
    waits = class_changes.delete(teacher, "ada", "elk", images=True, accept=False)
    assert waits.job is not None
    finished(teacher, waits.job, "done")
    assert all(teacher.store.image(number) for number in elks)
    teacher.discard(waits.job.id, "ada")
    assert (labels_of(teacher), teacher.current().version) == (before, base)
    # Published.
    done = class_changes.delete(teacher, "ada", "elk", images=True, accept=True)
    assert done.job is not None
    finished(teacher, done.job, "accepted")
    assert labels_of(teacher) == dict.fromkeys(foxes, "fox")
    assert "elk" not in teacher.current().labels
    for number in elks:
        with pytest.raises(UnknownIdError):
            teacher.store.image(number)


def test_a_deletion_that_was_killed_after_publishing_is_completed(teacher: Teacher, tmp_path: Path) -> None:
    elks = label(teacher, "elk")
    finished(teacher, teacher.learn("ada", Wanted(), accept=True), "accepted")
    waits = class_changes.delete(teacher, "ada", "elk", images=True, accept=False).job
    assert waits is not None
    candidate = finished(teacher, waits, "done").candidate
    assert candidate is not None
    # The shelf points at it, and whoever did that was killed before anything was noted.
    Shelf(tmp_path / "shelf").point_at(candidate)
    assert set(labels_of(teacher)) == set(elks)
    teacher.reconcile()
    assert labels_of(teacher) == {}
    assert teacher.jobs.get(waits.id).state == "accepted"
    with pytest.raises(UnknownIdError):
        teacher.store.image(elks[0])


def test_merging_into_a_class_that_has_only_examples(teacher: Teacher) -> None:
    elks = label(teacher, "elk")
    finished(teacher, teacher.learn("ada", Wanted(), accept=True), "accepted")
    foxes, gnus = label(teacher, "fox"), label(teacher, "gnu")
    merged = class_changes.merge(teacher, "ada", ["elk", "gnu"], "fox", accept=True)
    assert merged.job is not None
    result = finished(teacher, merged.job, "accepted").result
    assert result is not None
    assert (result["classes"], result["renamed"], result["gate"]) == ([], {"elk": "fox"}, True)
    assert described(teacher.jobs.get(merged.job.id)) == "renamed elk to fox"
    assert len(result["old_classes"]["changed"]) == 0
    assert result["old_classes"]["images"] == 8 * 24 + IMAGES, "the renamed class is compared, too"
    assert "elk" not in teacher.current().labels
    assert "fox" in teacher.current().labels
    assert labels_of(teacher) == dict.fromkeys([*elks, *foxes, *gnus], "fox")
    assert {each.id for each in teacher.pending().waiting} == {*foxes, *gnus}


def test_learning_without_a_person_keeps_its_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"OPENWORLD_TEACH": "auto", "OPENWORLD_TEACH_AUTO_IMAGES": "10", "OPENWORLD_TEACH_AUTO_CLASSES": "1"}
    with teacher_of(tmp_path, monkeypatch, **limits) as (teacher, settings):
        first = teacher.current().version
        autonomy = Autonomy(teacher, settings)
        autonomy.close()
        teacher.store.add([arrival(content=content) for content in pictures("fox", 9)])
        assert not autonomy.look(), "fewer images than the limit"
        # Large enough groups of two kinds; only one class per day is allowed.
        more = [*pictures("fox", 16, first=9), *pictures("gnu", 14)]
        teacher.store.add([arrival(content=content) for content in more])
        assert autonomy.look()
        (job,) = teacher.jobs.of_kind("auto")
        finished(teacher, job, "accepted")
        assert teacher.current().labels[-1] == "new-1"
        assert "new-2" not in teacher.current().labels
        teacher.store.add([arrival(content=content) for content in pictures("gnu", 14, first=50)])
        assert not autonomy.look(), "one class was learned within a day"
        noted = [(change.who, change.what) for change in teacher.store.changes(50)]
        assert {("auto", "auto"), ("auto", "teach"), ("auto", "publish"), ("auto", "accept")} <= set(noted)
        assert teacher.roll_back(first, "ada").version == first
        assert teacher.versions()[-1].classes == len(teacher.current().labels) == 8
        assert "new-1" not in teacher.current().labels


def test_autonomy_is_off_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENWORLD_TEACH", raising=False)
    assert Settings.from_environment().teach == "on"
