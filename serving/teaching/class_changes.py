"""Renaming, merging and deleting classes.

What only examples have is changed in the store at once. What the model has is changed by a job. Then the examples, too,
change when the job's result is published, in one transaction: a job that is refused, fails or is discarded leaves
everything as it is. The gate before publishing holds as for any lesson; if it objects, the result waits for a decision.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

from serving import errors
from serving.bundle.labels import plain, same_label
from serving.teaching.curriculum import check_label
from serving.teaching.jobs import JobRecord
from serving.teaching.lesson_job import Wanted

if TYPE_CHECKING:
    from serving.teaching.teacher import Teacher


class ChangedClasses(NamedTuple):
    """How many examples were changed at once, and the job that changes the model, if it has the classes."""

    items: int
    job: JobRecord | None


def rename(teacher: Teacher, who: str, label: str, new: str, *, accept: bool) -> ChangedClasses:
    """Give a class another name."""
    new = plain(new)
    check_label(new)
    _check_known(teacher, [label])
    # A name may be changed to another spelling of itself, such as the one without a space behind it.
    if new == label or same_label(new, all_labels(teacher) - {label}) is not None:
        allowed = "a new name, or merge the classes"
        raise errors.ClassExistsError("the class exists", got=repr(new), allowed=allowed)
    known = teacher.current().labels
    if label not in known:
        return ChangedClasses(teacher.store.relabel({label: new}, known, who), None)
    return _started(teacher, who, Wanted(rename={label: new}, examples=False), accept)


def merge(teacher: Teacher, who: str, labels: Sequence[str], into: str, *, accept: bool) -> ChangedClasses:
    """Make the examples of classes those of another class."""
    _check_known(teacher, [*labels, into])
    if into in labels:
        raise errors.BadLabelError("a class cannot be merged into itself", got=repr(into), allowed="another class")
    manifest = teacher.current()
    known = manifest.labels
    examples_only = dict.fromkeys((label for label in labels if label not in known), into)
    in_model = [label for label in dict.fromkeys(labels) if label in known]
    if not in_model:
        return ChangedClasses(teacher.store.relabel(examples_only, known, who), None)
    renamed: dict[str, str] = {}
    if into not in known:
        # The other class has examples only: one of the model's classes takes its name, best one that a run has learned,
        # because that cannot be merged into another.
        tasks = {lesson.task for lesson in manifest.lessons}
        taught = {label for task in manifest.tasks if task.task in tasks for label in task.labels}
        first = next((label for label in in_model if label not in taught), in_model[0])
        renamed = {first: into}
        in_model.remove(first)
    wanted = Wanted(rename=renamed, merge=dict.fromkeys(in_model, into), relabel=examples_only, examples=False)
    return _started(teacher, who, wanted, accept)


def delete(teacher: Teacher, who: str, label: str, *, images: bool, accept: bool) -> ChangedClasses:
    """Take a class out, as if it had never been learned; with `images`, its examples are deleted with their files."""
    _check_known(teacher, [label])
    ids = tuple(each.id for each in teacher.store.examples(label)) if images else ()
    if label in teacher.current().labels:
        return _started(teacher, who, Wanted(forget=(label,), delete=ids, examples=False), accept)
    deleted = teacher.store.delete(ids, who) if ids else 0
    return ChangedClasses(deleted + len(teacher.store.withdraw_class(label, who)), None)


def all_labels(teacher: Teacher) -> set[str]:
    """All classes: of the model, with examples, or begun."""
    labelled = {str(each.label) for each in teacher.store.examples()}
    return {*teacher.current().labels, *labelled, *teacher.store.drafts()}


def _started(teacher: Teacher, who: str, wanted: Wanted, accept: bool) -> ChangedClasses:
    return ChangedClasses(0, teacher.learn(who, wanted, accept=accept))


def _check_known(teacher: Teacher, labels: Collection[str]) -> None:
    known = all_labels(teacher)
    for label in labels:
        if label not in known:
            shown = ", ".join(sorted(known)[:20])
            raise errors.NoSuchItemError("no such class", got=repr(label), allowed=shown)
