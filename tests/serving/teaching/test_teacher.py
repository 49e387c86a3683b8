"""Changes of classes, learning without a person, and an object store: real jobs on a real store, without a server."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from serving import errors
from serving.bundle.model import BundleModel
from serving.bundle.shelf import Shelf
from serving.inference.loaded import TRUNK_KEY
from serving.quarantine.records import UnknownIdError
from serving.settings import Settings
from serving.teaching import class_changes
from serving.teaching import teacher as teacher_module
from serving.teaching.api.views import status_view
from serving.teaching.auto import Autonomy
from serving.teaching.job_texts import described
from serving.teaching.lesson_job import Wanted
from serving.teaching.teacher import Teacher
from tests.helpers_quarantine import arrival
from tests.helpers_teacher import OneWorker, finished, teacher_of
from tests.helpers_teaching import encode, pictures

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


def test_a_deletion_that_was_killed_after_publishing_is_completed(
    teacher: Teacher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elks = label(teacher, "elk")
    finished(teacher, teacher.learn("ada", Wanted(), accept=True), "accepted")
    waits = class_changes.delete(teacher, "ada", "elk", images=True, accept=False).job
    assert waits is not None
    candidate = finished(teacher, waits, "done").candidate
    assert candidate is not None
    # The shelf points at it, and whoever did that was killed before anything was noted.
    Shelf(tmp_path / "shelf").point_at(candidate)
    assert set(labels_of(teacher)) == set(elks)
    monkeypatch.setattr(OneWorker, "late", True)
    teacher.reconcile()
    assert teacher.jobs.get(waits.id).state == "done", "no one may see it accepted before all workers answer by it"
    monkeypatch.setattr(OneWorker, "late", False)
    teacher.reconcile()
    assert labels_of(teacher) == {}
    assert teacher.jobs.get(waits.id).state == "accepted"
    with pytest.raises(UnknownIdError):
        teacher.store.image(elks[0])


def test_who_comes_second_reads_what_the_other_began_and_what_is_lost(teacher: Teacher) -> None:
    label(teacher, "elk")

    def refused(job_id: int) -> str:
        with pytest.raises(errors.JobStateError) as refusal:
            teacher.accept(job_id, "ada")
        return str(refusal.value)

    lesson = finished(teacher, teacher.learn("ada", Wanted()), "done")
    renamed = class_changes.rename(teacher, "bob", "ant", "emmet", accept=True).job
    assert renamed is not None
    finished(teacher, renamed, "accepted")
    assert "elk" not in teacher.current().labels
    text = refused(lesson.id)
    began = f"job {lesson.id} is discarded, because bob began job {renamed.id}, which is for renaming 'ant' to 'emmet'"
    assert f"{began}; labelled images still wait" in text
    assert "learns all" not in text
    # A change of a class that waits for a decision is discarded by somebody else's lesson, which does not have it.
    deletion = class_changes.delete(teacher, "ada", "bee", images=False, accept=False).job
    assert deletion is not None
    finished(teacher, deletion, "done")
    second = teacher.learn("bob", Wanted())
    text = refused(deletion.id)
    assert f"because bob began job {second.id}, which learns all that is labelled" in text
    assert "ask again for deleting 'bee'" in text
    # A job that a person has discarded was not discarded by whatever came later.
    finished(teacher, second, "done")
    teacher.discard(second.id, "ada")
    later = class_changes.merge(teacher, "bob", ["elk"], "dog", accept=False)
    assert later.job is None
    finished(teacher, teacher.learn("bob", Wanted()), "done")
    assert "began" not in refused(second.id)


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
        learned = teacher.current().version
        named = {number for number, name in labels_of(teacher).items() if name == "new-1"}
        assert len(named) >= 10
        mine = label(teacher, "elk")
        assert teacher.roll_back(first, "ada").version == first
        assert teacher.versions()[-1].classes == len(teacher.current().labels) == 8
        assert "new-1" not in teacher.current().labels
        # What nobody has named would come back with the next lesson; what a person has named waits.
        assert labels_of(teacher) == dict.fromkeys(mine, "elk")
        # To undo this brings the labels back, or the next lesson would take the class out.
        teacher.roll_back(learned, "ada")
        assert {number for number, name in labels_of(teacher).items() if name == "new-1"} == named
        assert teacher.pending().removed == ()


def test_a_class_that_a_person_has_called_new_1_is_that_persons(teacher: Teacher) -> None:
    first = teacher.current().version
    added = teacher.store.add([arrival(content=content) for content in pictures("elk", IMAGES)])
    teacher.store.teach(added.ids, "new-1", teacher.current().labels, "ada")
    finished(teacher, teacher.learn("ada", Wanted(), accept=True), "accepted")
    assert status_view(teacher, teacher.current(), "ada", auto=True).unnamed == ()
    # The server learned this one by itself, and a person renamed it.
    more = teacher.store.add([arrival(content=content) for content in pictures("fox", IMAGES)])
    teacher.store.teach(more.ids, "new-2", teacher.current().labels, "auto")
    finished(teacher, teacher.learn("ada", Wanted(), accept=True), "accepted")
    assert status_view(teacher, teacher.current(), "ada", auto=True).unnamed == ("new-2",)
    renamed = class_changes.rename(teacher, "ada", "new-2", "fox", accept=True).job
    assert renamed is not None
    finished(teacher, renamed, "accepted")
    teacher.roll_back(first, "ada")
    assert labels_of(teacher) == {**dict.fromkeys(added.ids, "new-1"), **dict.fromkeys(more.ids, "fox")}


def test_a_result_that_the_gate_objects_to_does_not_stop_learning_without_a_person(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {"OPENWORLD_TEACH": "auto", "OPENWORLD_TEACH_AUTO_IMAGES": "10"}
    with teacher_of(tmp_path, monkeypatch, **limits) as (teacher, settings):
        autonomy = Autonomy(teacher, settings)
        autonomy.close()
        base = teacher.current().version
        named = label(teacher, "elk")
        teacher.store.teach(named, "new-1", teacher.current().labels, "auto")
        worse = {"gate": False, "old_classes": {"worse": [{"label": "ant"}]}, "named": ["new-1"]}
        request = {"images": 10, "classes": 3, "latest": max(named), "accept": True}
        job = teacher.jobs.start("auto", "auto", base, request)
        teacher.jobs.finish(job.id, worse, candidate="made-by-it")
        assert not autonomy.look()
        assert teacher.jobs.get(job.id).state == "discarded"
        assert labels_of(teacher) == {}, "its images are unlabelled again"
        assert ("auto", "discard", f"job {job.id}: the gate objects, because 'ant' would lose too much") in [
            (change.who, change.what, change.detail) for change in teacher.store.changes(10)
        ]
        teacher.store.add([arrival(content=content) for content in pictures("fox", 16)])
        assert autonomy.look(), "nothing is in the way of the next one"
        finished(teacher, teacher.jobs.of_kind("auto")[-1])


def test_known_images_that_would_become_unknown_are_named(teacher: Teacher) -> None:
    known = {"images": 200, "known": 190, "lost": 40, "alpha": 0.05, "too_many": True}
    result = {"gate": False, "old_classes": {"worse": []}, "known_images": known}
    job = teacher.jobs.start("learn", "ada", teacher.current().version, {})
    teacher.jobs.finish(job.id, result, candidate="made-by-it")
    with pytest.raises(errors.GateError, match="40 of 190 known images would become unknown"):
        teacher.accept(job.id, "ada")


def test_a_result_that_waits_for_a_person_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with teacher_of(tmp_path, monkeypatch, OPENWORLD_TEACH="auto") as (teacher, settings):
        autonomy = Autonomy(teacher, settings)
        autonomy.close()
        job = teacher.jobs.start("learn", "ada", teacher.current().version, {"accept": True})
        teacher.jobs.finish(job.id, {"gate": False, "old_classes": {"worse": []}}, candidate="made-by-it")
        assert not autonomy.look()
        assert teacher.jobs.get(job.id).state == "done"


def test_a_result_is_published_although_its_worker_has_died(teacher: Teacher, monkeypatch: pytest.MonkeyPatch) -> None:
    label(teacher, "elk")
    with monkeypatch.context() as patch:
        # A worker that dies after it has started the job.
        patch.setattr(Teacher, "_watch", lambda *given: None)
        job = finished(teacher, teacher.learn("ada", Wanted(), accept=True), "done")
    teacher.reconcile()
    with pytest.raises(errors.TeachBusyError, match="which is being published"):
        teacher.learn("bob", Wanted())
    assert teacher.jobs.get(job.id).state == "done", "its own worker may still do it"
    monkeypatch.setattr(teacher_module, "DUE_AFTER", 0.0)
    teacher.reconcile()
    finished(teacher, job, "accepted")
    assert "elk" in teacher.current().labels
    assert [change.who for change in teacher.store.changes(20) if change.what == "accept"] == ["ada"]


def test_what_nobody_asked_to_publish_is_not_published(teacher: Teacher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher_module, "DUE_AFTER", 0.0)
    label(teacher, "elk")
    job = finished(teacher, teacher.learn("ada", Wanted()), "done")
    for thread in threading.enumerate():
        if thread.name == "teaching":
            thread.join()
    teacher.reconcile()
    assert not [thread for thread in threading.enumerate() if thread.name == "teaching"]
    assert teacher.jobs.get(job.id).state == "done"


def test_the_process_of_a_job(teacher: Teacher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread, because several wait for each other while requests have the processors; the session of the server,
    because a session of its own would have its share of the processors whatever its priority is."""
    program, seen = tmp_path / "python", tmp_path / "seen"
    program.write_text(
        f"#!{sys.executable}\nimport json, os\n"
        "found = {**os.environ, 'session': os.getsid(0), 'group': os.getpgid(0), 'pid': os.getpid()}\n"
        f"open('{seen}', 'w').write(json.dumps(found))\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    label(teacher, "elk")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(program))
        job = teacher.learn("ada", Wanted())
    teacher.jobs.fail(job.id, "it only looked around")
    until = time.monotonic() + 30
    while not (seen.exists() and seen.read_text()):
        assert time.monotonic() < until
        time.sleep(0.02)
    found = json.loads(seen.read_text())
    assert [found[f"{name}_NUM_THREADS"] for name in ("OMP", "OPENBLAS", "MKL")] == ["1", "1", "1"]
    assert (found["session"], found["group"]) == (os.getsid(0), found["pid"])


def test_only_images_that_are_unknown_now_can_become_known(teacher: Teacher, tmp_path: Path) -> None:
    """Images of a class that was taught meanwhile still wait, but no lesson makes them known a second time."""
    model = BundleModel.load(tmp_path / "shelf" / "current", provider="cpu", threads=1)
    assert model.manifest.trunk is not None
    answer = {"label": "unknown", TRUNK_KEY: model.manifest.trunk.sha256}
    for name in ("elk", "fox"):
        contents = pictures(name, 10, first=500)
        vectors = encode(contents)
        teacher.store.add(
            [arrival(content=one, features=row, answer=answer) for one, row in zip(contents, vectors, strict=True)]
        )
    counts = []
    for name in ("elk", "fox"):
        label(teacher, name)
        result = finished(teacher, teacher.learn("ada", Wanted(), accept=True), "accepted").result
        assert result is not None
        counts.append((result["waiting_unknown"], result["waiting_by_class"]))
    (first, by_first), (second, by_second) = counts
    assert first >= 18
    assert by_first["elk"] >= 7
    assert second <= first - 7
    assert by_second["fox"] >= 7
    assert "elk" not in by_second


def test_autonomy_is_off_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENWORLD_TEACH", raising=False)
    assert Settings.from_environment().teach == "on"


def test_a_class_is_not_renamed_to_what_looks_like_another_one(teacher: Teacher) -> None:
    teacher.store.begin_class("caf\u00e9", "ada")
    teacher.store.begin_class("fox", "ada")
    for name in ("cafe\u0301", " caf\u00e9", "fox"):
        with pytest.raises(errors.ClassExistsError, match="the class exists"):
            class_changes.rename(teacher, "ada", "fox", name, accept=False)
    class_changes.rename(teacher, "ada", "fox", "red  fox", accept=False)
    assert set(teacher.store.drafts()) == {"caf\u00e9", "red fox"}
