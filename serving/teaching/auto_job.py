"""Learning without a person: groups of unknown images that are large and coherent become classes "new-1", "new-2", ...

People give them names later, or delete them. Only what this job has named itself is learned; labels of people wait for
them. The gate before publishing is never overruled.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serving.bundle.model import BundleModel
from serving.bundle.sections import LessonInfo
from serving.quarantine.records import ItemGroup
from serving.teaching.group_job import group_unknowns
from serving.teaching.jobs import JobRecord
from serving.teaching.lesson_job import Shows, learn_labels

if TYPE_CHECKING:
    from serving.quarantine.store import Store

WHO = "auto"
COHERENT = 0.9
"""Share of the nearest neighbours of a group's images that are in the group too."""
_NAME = re.compile(r"new-([0-9]+)")


def learn_groups(
    job: JobRecord, store: Store, model: BundleModel, shelf: Path, display: Shows
) -> tuple[dict[str, Any], str | None]:
    """Group the unlabelled images, and learn groups that are good enough; no candidate if none is."""
    least, most = int(job.request["images"]), int(job.request["classes"])
    grouped = group_unknowns(store, model, _Part(display, 0.0, 0.5))
    chosen = [group for group in store.groups() if is_class(group, least)]
    chosen.sort(key=lambda group: (-group.cohesion, -group.size))
    names = new_names([*model.manifest.labels, *(str(each.label) for each in store.examples())])
    labels = []
    for group, label in zip(chosen[:most], names, strict=False):
        ids = [number for number, state in store.members(group.id).items() if state == "new"]
        store.teach(ids, label, model.manifest.labels, WHO)
        labels.append(label)
    if not labels:
        return {"grouped": grouped, "named": []}, None
    wanted = replace(job, request={**job.request, "only": labels})
    result, candidate = learn_labels(wanted, store, model, shelf, _Part(display, 0.5, 1.0))
    return {**result, "grouped": grouped, "named": labels}, candidate


def is_class(group: ItemGroup, least: int) -> bool:
    """Whether a group of unlabelled images is large and coherent enough to become a class."""
    return set(group.states) == {"new"} and group.size >= least and group.cohesion >= COHERENT and not group.shifted


def is_made_up(label: str, who: str) -> bool:
    """Whether a label is one that this job made up; `who` are the people who gave it, as they are noted.

    A person may call a class "new-1", too, and a class that a person has renamed is that person's.
    """
    return _NAME.fullmatch(label) is not None and WHO in who.split(", ")


def made_up(lessons: Iterable[LessonInfo]) -> set[str]:
    """The labels that this job made up, of those with examples in some lessons."""
    return {label for lesson in lessons for label in lesson.images if is_made_up(label, lesson.taught_by)}


def new_names(taken: Iterable[str]) -> Iterable[str]:
    """new-1, new-2, ... after the last one that there is."""
    last = max((int(found[1]) for label in taken if (found := _NAME.fullmatch(label))), default=0)
    while True:
        last += 1
        yield f"new-{last}"


class _Part:
    """A part of the progress of a job."""

    def __init__(self, display: Shows, start: float, end: float) -> None:
        self._display, self._start, self._end = display, start, end

    def part(self, step: str, start: float, end: float) -> Any:
        width = self._end - self._start
        return self._display.part(step, self._start + start * width, self._start + end * width)
