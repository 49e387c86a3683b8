"""Finds lessons of a server that publishing a new bundle of its run would silently discard."""

from __future__ import annotations

from collections.abc import Sequence

from serving.bundle.manifest import Manifest
from serving.bundle.sections import LessonInfo

MOST_LESSONS = 5
"""Lessons that a message lists, the latest ones."""
GO_BACK = (
    "to serve a version without these lessons again (Versions on the page /teach), to publish, and to learn there what "
    "waits then: the examples keep their labels"
)
CONSOLIDATE = (
    "to learn adapters of the taught classes, which continues this version "
    "(`openworld learn-unknowns RUN --consolidate --publish SHELF`); or "
)


def lost_lessons(old: Manifest, new: Manifest) -> str | None:
    """A message that names the lessons missing from the new bundle and what to do instead; None if none is missing.

    Lessons are repeated in their order, so those of the old bundle have to be the first ones of the new bundle.
    """
    if new.lessons[: len(old.lessons)] == old.lessons:
        return None
    lost = [lesson for lesson in old.lessons if lesson not in new.lessons] or list(old.lessons)
    # Only new classes can have an adapter. Further examples of known classes are a part of the statistics alone.
    own_way = CONSOLIDATE if any(lesson.task is not None for lesson in lost) else ""
    return (
        f"publishing would lose what version {old.version} was taught by a server: got a bundle without "
        f"{_described(lost)}; allowed: {own_way}{GO_BACK}"
    )


def _described(lessons: Sequence[LessonInfo]) -> str:
    earlier = len(lessons) - MOST_LESSONS
    shown = "; ".join(map(_lesson, lessons[-MOST_LESSONS:]))
    return f"{shown}; and {earlier} earlier lessons" if earlier > 0 else shown


def _lesson(lesson: LessonInfo) -> str:
    """Such as: 'dog' (10 more images) and 'elk' (new, 12 images), by ada on 2024-01-01T00:00:00+00:00."""
    parts = [
        f"{label!r} ({count} more images)" if label in lesson.extends else f"{label!r} (new, {count} images)"
        for label, count in lesson.images.items()
    ]
    return f"{', '.join(parts)}, by {lesson.taught_by} on {lesson.taught_at}"
