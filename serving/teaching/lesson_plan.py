"""What a lesson learns of what waits: classes with too few examples are left out, so that they delay nobody."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from serving.bundle.manifest import Manifest
from serving.quarantine.records import Example
from serving.teaching.curriculum import LEAST


class ShortClass(NamedTuple):
    """A class with too few examples, which a lesson leaves as it is."""

    label: str
    images: int
    """Examples that it would have."""
    missing: int
    """How many more it needs."""
    learned: bool
    """Whether the model has learned it, and too few of its examples would be left; else it is new and waits."""


class LessonPlan(NamedTuple):
    """A part of what waits."""

    fresh: tuple[Example, ...]
    """Examples that are added."""
    gone: frozenset[str]
    """Digests of examples that are taken out."""
    short: tuple[ShortClass, ...]
    """Classes that are left as they are."""

    @property
    def empty(self) -> bool:
        """Whether nothing can be learned."""
        return not self.fresh and not self.gone

    @property
    def reason(self) -> str:
        """Why classes are left as they are."""
        return ", ".join(f"{each.label!r} has {each.images} of {LEAST} examples" for each in self.short)


def plan_lesson(
    taught: Mapping[str, str], gone: Collection[str], waiting: Sequence[Example], run_labels: Collection[str]
) -> LessonPlan:
    """What a lesson can learn.

    `taught` is digest -> label of what the model was taught, `gone` are digests to be taken out of it, and `waiting`
    are examples to be added. A new class with too few examples waits. A taught class of which too few would be left
    stays as it is, with all its examples; one of which none would be left is deleted.
    """
    out, short = set(gone), dict[str, ShortClass]()
    learned = set(taught.values())
    while True:
        fresh = [
            each for each in waiting if each.label not in short and (each.digest not in taught or each.digest in out)
        ]
        left = [label for digest, label in taught.items() if digest not in out]
        images = Counter(left) + Counter(str(each.label) for each in fresh)
        few = {n for n in images if images[n] < LEAST and n not in run_labels and n not in short}
        if not few:
            return LessonPlan(tuple(fresh), frozenset(out), tuple(short[label] for label in sorted(short)))
        short |= {each: ShortClass(each, images[each], LEAST - images[each], each in learned) for each in few}
        # Examples of a class that stays cannot be those of another one, which may have too few by that.
        out -= {digest for digest, label in taught.items() if label in few}


def labels_of_run(manifest: Manifest) -> tuple[str, ...]:
    """The classes that the run learned, which need no example."""
    taught = {lesson.task for lesson in manifest.lessons}
    return tuple(label for task in manifest.tasks if task.task not in taught for label in task.labels)
