"""Builds the responses of /teach from the store, the shelf and the jobs."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Literal

from pydantic import ValidationError

from serving.bundle.manifest import Manifest
from serving.http.schemas import ModelName
from serving.quarantine.api.overview import entry_of
from serving.quarantine.records import Example, Item
from serving.teaching.api import schemas
from serving.teaching.auto_job import made_up
from serving.teaching.curriculum import LEAST
from serving.teaching.exporting import parts_of
from serving.teaching.job_texts import described
from serving.teaching.jobs import DAMAGED, JobRecord
from serving.teaching.lesson_plan import LessonPlan
from serving.teaching.teacher import Pending, Teacher
from serving.teaching.trial import ENOUGH

if TYPE_CHECKING:
    from serving.quarantine.store import Store

Shown = Literal["any", "waiting", "learned"]


def job_view(job: JobRecord) -> schemas.TeachingJob:
    learned = grouped = None
    result, error = job.result, job.error
    try:
        if result is not None and "old_classes" in result:
            learned = schemas.LearnResult.model_validate(result, extra="ignore")
        if result is not None and job.kind != "learn":
            grouped = schemas.GroupResult.model_validate(result.get("grouped", result), extra="ignore")
    except ValidationError:
        error = DAMAGED
    return schemas.TeachingJob(
        id=job.id,
        kind=job.kind,
        state=job.state,
        progress=job.progress,
        step=job.step,
        who=job.who,
        started_at=job.started_at,  # type: ignore[arg-type]  # the field turns seconds into text
        seconds=round(job.seconds, 3),
        base=job.base,
        candidate=job.candidate,
        error=error,
        accepts=bool(job.request.get("accept")),
        learned=learned,
        grouped=grouped,
    )


def status_view(teacher: Teacher, served: Manifest, who: str, *, auto: bool) -> schemas.TeachStatus:
    problem = teacher.problem()
    job = None
    pending, plan = Pending((), (), {}), LessonPlan((), frozenset(), ())
    if problem is None:
        teacher.reconcile()
        pending, job = teacher.pending(), teacher.jobs.latest()
        plan = teacher.plan(pending)
    return schemas.TeachStatus(
        enabled=problem is None,
        reason=problem,
        user=who,
        auto=auto,
        model=ModelName(name=served.name, version=served.version),
        waiting=len(pending.waiting),
        removed=len(pending.removed),
        classes=dict(Counter(str(each.label) for each in pending.waiting).most_common()),
        unknown=teacher.store.count_new(),
        minimum=ENOUGH,
        least=LEAST,
        too_few=tuple(schemas.ShortClassEntry(**each._asdict()) for each in plan.short),
        ready=not plan.empty,
        unnamed=tuple(label for label in served.labels if label in made_up(served.lessons)),
        job=None if job is None else job_view(job),
    )


def class_views(teacher: Teacher, examples: int, most: int) -> schemas.ClassList:
    """All classes with some examples of each, and the archives of up to `most` bytes that an export consists of."""
    manifest, pending = teacher.current(), teacher.pending()
    waiting = {each.id for each in pending.waiting}
    by_label: dict[str, list[Example]] = defaultdict(list)
    everything = teacher.store.examples()
    for each in everything:
        by_label[str(each.label)].append(each)
    drafts = teacher.store.drafts()
    verdicts = {each.label: each for each in manifest.taught}
    task_of = {label: task.task for task in manifest.tasks for label in task.labels}
    taught_tasks = {lesson.task for lesson in manifest.lessons}
    images = teacher.images()
    taught, removed = Counter(pending.taught.values()), Counter(pending.taught[name] for name in pending.removed)
    found = []
    for label in dict.fromkeys([*by_label, *drafts, *task_of]):
        lessons = [lesson for lesson in manifest.lessons if label in lesson.images]
        task = task_of.get(label)
        own = by_label.get(label, [])
        found.append(
            schemas.ClassEntry(
                label=label,
                in_model=task is not None,
                task=task,
                origin="waiting" if task is None else "taught" if task in taught_tasks else "fit",
                images=images.get(label, 0),
                learned=taught[label],
                waiting=sum(each.id in waiting for each in own),
                removed=removed[label],
                extended=any(label in lesson.extends for lesson in lessons),
                taught_by=lessons[-1].taught_by if lessons else None,
                taught_at=lessons[-1].taught_at if lessons else None,
                created_by=drafts[label][0] if label in drafts else None,
                grade=verdicts[label].grade if label in verdicts else None,
                advice=verdicts[label].advice if label in verdicts else "",
                examples=tuple(_example(each, waiting) for each in own[-examples:]) if examples else (),
            )
        )
    rank = {"waiting": 0, "taught": 1, "fit": 2}
    found.sort(key=lambda each: (rank[each.origin], not each.waiting, each.label))
    parts = len(parts_of(everything, most, [each.label for each in found]))
    return schemas.ClassList(version=manifest.version, classes=tuple(found), export_parts=parts)


def example_views(teacher: Teacher, label: str | None, shown: Shown, *, after: int, limit: int) -> schemas.ExampleList:
    waiting = {each.id for each in teacher.pending().waiting}
    chosen = [
        each
        for each in teacher.store.examples(label)
        if each.id > after and (shown == "any" or (each.id in waiting) == (shown == "waiting"))
    ]
    page = chosen[:limit]
    items = {item.id: item for item in teacher.store.items(ids=[each.id for each in page])} if page else {}
    return schemas.ExampleList(
        items=tuple(_detail(each, items[each.id], waiting) for each in page if each.id in items),
        next=page[-1].id if len(chosen) > limit else None,
    )


def loose_views(store: Store, *, after: int, limit: int) -> schemas.LooseList:
    found = store.items(group=None, state="new", after=after, limit=limit + 1)
    resembled = store.resemblances([item.id for item in found])
    return schemas.LooseList(
        items=tuple(
            schemas.LooseItem(**entry_of(item).model_dump(), looks_like=_resemblance(resembled.get(item.id)))
            for item in found[:limit]
        ),
        next=found[limit - 1].id if len(found) > limit else None,
    )


def version_views(teacher: Teacher) -> schemas.VersionList:
    current, previous = teacher.links()
    made = teacher.jobs.accepted()
    return schemas.VersionList(
        versions=tuple(
            schemas.VersionEntry(
                version=each.version,
                created=each.created,
                current=each.name == current,
                previous=each.name == previous,
                classes=each.classes,
                lessons=each.lessons,
                who=made[each.name].who if each.name in made else None,
                what=described(made[each.name]) if each.name in made else "published",
            )
            for each in teacher.versions()
        )
    )


def _resemblance(found: tuple[int, float] | None) -> schemas.Resemblance | None:
    return None if found is None else schemas.Resemblance(group=found[0], similarity=found[1])


def _example(each: Example, waiting: set[int]) -> schemas.ExampleEntry:
    return schemas.ExampleEntry.model_validate(_fields(each, waiting))


def _fields(each: Example, waiting: set[int]) -> dict[str, object]:
    return {
        "id": each.id,
        "label": str(each.label),
        "state": "waiting" if each.id in waiting else "learned",
        "labelled_by": each.labelled_by,
        "labelled_at": each.labelled_at,
    }


def _detail(each: Example, item: Item, waiting: set[int]) -> schemas.ExampleDetail:
    guess, known, p_value = (item.answer.get(name) for name in ("best_guess", "known", "p_value"))
    return schemas.ExampleDetail.model_validate(
        {
            **_fields(each, waiting),
            "received_at": item.received_at,
            "copies": item.copies,
            "width": item.width,
            "height": item.height,
            "kind": item.kind,
            "best_guess": guess if isinstance(guess, str) else None,
            "known": known if isinstance(known, bool) else None,
            "p_value": p_value if isinstance(p_value, float) else None,
        }
    )
