"""Jobs in words: what one has changed, what the gate objects to, and why one was discarded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from serving.teaching.jobs import JobRecord
from serving.teaching.lesson_job import Wanted


def described(job: JobRecord) -> str:
    """What a learn job has changed, in a few words; no more than its kind if something else has changed its result."""
    try:
        return _changed(job.result or {}) or job.kind
    except (AttributeError, KeyError, TypeError):
        return job.kind


def _changed(result: dict[str, Any]) -> str:
    parts = []
    new = [each["label"] for each in result.get("classes", ()) if each["new"]]
    more = [each["label"] for each in result.get("classes", ()) if not each["new"]]
    for verb, labels in (("learned", new), ("changed the examples of", more), ("deleted", result.get("deleted", ()))):
        if labels:
            parts.append(f"{verb} {_some(labels)}")
    for verb, names in (("renamed", result.get("renamed", {})), ("merged", result.get("merged", {}))):
        parts += [f"{verb} {old} to {new}" for old, new in names.items()]
    return "; ".join(parts)


def _some(labels: Sequence[str]) -> str:
    return ", ".join(labels[:5]) + (f" and {len(labels) - 5} more" if len(labels) > 5 else "")


def objections(job: JobRecord) -> str:
    """What the gate objects to."""
    result, found = job.result or {}, []
    if worse := ", ".join(repr(each["label"]) for each in result.get("old_classes", {}).get("worse", ())):
        found.append(f"{worse} would lose too much")
    if (known := result.get("known_images", {})).get("too_many"):
        share = f"more than a share of {known['alpha']:g}"
        found.append(f"{known['lost']} of {known['known']} known images would become unknown, {share}")
    return " and ".join(found) or "a class would lose too much"


def replaced(job: JobRecord, later: JobRecord) -> str:
    """Why a job was discarded before it was accepted: a later job continues the same version. States what the later job
    does, and which changes of this one are lost."""
    lost = _changes(Wanted.of(job.request)) if job.kind == "learn" else []
    again = f"; ask again for {', '.join(lost)}" if lost else ""
    return f", because {later.who} began job {later.id}, which {_purpose(later)}{again}"


def _purpose(job: JobRecord) -> str:
    if job.kind != "learn":
        return "learns groups of unknown images automatically; labelled images still wait"
    wanted = Wanted.of(job.request)
    learns = "learns all that is labelled" if wanted.only is None else f"learns {_some(wanted.only)}"
    if not (changes := _changes(wanted)):
        return learns
    return f"is for {', '.join(changes)}" + (f" and {learns}" if wanted.examples else "; labelled images still wait")


def _changes(wanted: Wanted) -> list[str]:
    """The changes of classes that were asked for, such as "deleting 'cow'"."""
    # Examples get another label without a change of the model only if their class is merged.
    merged = {**wanted.merge, **wanted.relabel}
    return [
        *(f"deleting {label!r}" for label in wanted.forget),
        *(f"merging {label!r} into {into!r}" for label, into in merged.items()),
        *(f"renaming {label!r} to {new!r}" for label, new in wanted.rename.items()),
    ]
