"""The classes and examples that a bundle is computed from: those of a run, and of every lesson since.

Every change (examples added or removed, labels changed, a class deleted) makes a new curriculum. The content of a
bundle is a function of its curriculum alone. So after an example or a class was removed, the bundle is the same as if
it had never been taught.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from serving.bundle.decision import TaskRule
from serving.bundle.errors import BundleError
from serving.bundle.labels import check_new_label, did_you_mean
from serving.bundle.layout import STATISTICS, extension_name, lesson_name
from serving.bundle.lessons import TaughtLesson, Teachable
from serving.bundle.manifest import EXPORT_AGAIN, Bundle
from serving.bundle.model import load_pooled
from serving.bundle.pooled import Detector, EarlierTask, PooledClassifier
from serving.bundle.pooled.adapters import Adapter
from serving.bundle.pooled_model import Consolidated, Extension
from serving.teaching.errors import TeachError

Vectors = NDArray[np.float32]

LEAST = 2
"""Examples that a new class needs: one of them must be left out to see whether the others are enough."""


@dataclass(frozen=True)
class Task:
    """Classes that were learned together; detector and scores stay as they were then."""

    labels: tuple[str, ...]
    detector: Detector
    rule: TaskRule
    adapter: Adapter | None = None

    @property
    def frozen(self) -> EarlierTask:
        return EarlierTask(self.detector, self.rule)


@dataclass(frozen=True)
class Taught:
    """The result of a lesson: a task of its new classes, and detectors of the classes that it extended."""

    lesson: TaughtLesson
    task: Task | None
    extends: tuple[str, ...]
    extension: Extension | None
    """None without any, and in a bundle if later lessons have extended all of the classes again."""


def in_use(taught: Sequence[Taught]) -> list[set[str]]:
    """The classes of each lesson's extension that no later one extends again."""
    found: list[set[str]] = []
    later: set[str] = set()
    for each in reversed(taught):
        found.append(set(each.extends) - later)
        later |= set(each.extends)
    return found[::-1]


@dataclass(frozen=True)
class Examples:
    """The examples of one lesson by label, each with the digest that names it; who gave them, and when."""

    vectors: Mapping[str, Vectors]
    digests: Mapping[str, tuple[str, ...]]
    taught_by: str
    taught_at: str

    @classmethod
    def of(cls, given: Mapping[str, Sequence[tuple[str, Vectors]]], taught_by: str, taught_at: str) -> Examples:
        """From (digest, vector) by label, in any order: labels and examples are sorted, and a digest counts once."""
        unique = {label: dict(sorted(given[label], key=lambda one: one[0])) for label in sorted(given) if given[label]}
        return cls(
            {label: np.stack(list(found.values())).astype(np.float32) for label, found in unique.items()},
            {label: tuple(found) for label, found in unique.items()},
            taught_by,
            taught_at,
        )

    @property
    def images(self) -> dict[str, int]:
        return {label: len(names) for label, names in self.digests.items()}

    @property
    def seed(self) -> int:
        """The same for the same examples, whatever their labels and whenever they are taught."""
        names = "\n".join(sorted(name for some in self.digests.values() for name in some))
        return int.from_bytes(hashlib.sha256(names.encode()).digest()[:8], "big")

    def ambiguous(self) -> dict[str, list[str]]:
        """The labels of every digest that has several: which of them is true cannot be known."""
        found: dict[str, list[str]] = {}
        for label, names in self.digests.items():
            for name in names:
                found.setdefault(name, []).append(label)
        return {name: labels for name, labels in found.items() if len(labels) > 1}

    def without(self, digests: frozenset[str]) -> Examples | None:
        """The examples without some; None if nothing is left."""
        return self._of_rows({label: [name not in digests for name in names] for label, names in self.digests.items()})

    def relabelled(self, names: Mapping[str, str]) -> Examples:
        """The examples with other labels; labels that become equal are merged, in the place of the first."""
        vectors: dict[str, list[Vectors]] = {}
        digests: dict[str, list[str]] = {}
        for label, rows in self.vectors.items():
            new = names.get(label, label)
            vectors.setdefault(new, []).append(rows)
            digests.setdefault(new, []).extend(self.digests[label])
        order = {label: np.argsort(found, kind="stable") for label, found in digests.items()}
        return replace(
            self,
            vectors={label: np.concatenate(rows)[order[label]] for label, rows in vectors.items()},
            digests={label: tuple(np.array(found)[order[label]].tolist()) for label, found in digests.items()},
        )

    def _of_rows(self, kept: Mapping[str, Sequence[bool]]) -> Examples | None:
        chosen = {label: np.flatnonzero(rows) for label, rows in kept.items() if any(rows)}
        if not chosen:
            return None
        return replace(
            self,
            vectors={label: self.vectors[label][rows] for label, rows in chosen.items()},
            digests={label: tuple(self.digests[label][row] for row in rows) for label, rows in chosen.items()},
        )


@dataclass(frozen=True)
class Curriculum:
    """The classes of the run, by task, and the lessons since. `done` are lessons that need not be learned again."""

    tasks: tuple[Task, ...]
    teachable: Teachable
    lessons: tuple[Examples, ...]
    done: tuple[Taught, ...]
    """The results of the first lessons in the bundle that was read; a change keeps those before it."""
    weight: float = 0.0
    """The weight of the adapters of the run's tasks, if it has some."""
    consolidated: tuple[Consolidated, ...] = ()
    """The adapters of taught classes, as they were learned; see `adapted`."""
    classifier: PooledClassifier | None = None
    """The classifier of these classes and lessons, if it is that of the bundle that was read."""

    @classmethod
    def of(cls, bundle: Bundle) -> Curriculum:
        """Everything that a bundle can be taught from; a TeachError if it cannot be taught."""
        manifest = bundle.manifest
        if manifest.trunk is None:
            raise TeachError(f"{bundle.path}: no trunk; allowed: a bundle of photos, whose classes are statistics")
        if STATISTICS not in manifest.files:
            raise TeachError(f"{bundle.path}: no {STATISTICS}; {EXPORT_AGAIN}")
        try:
            teachable = Teachable.from_arrays(bundle.arrays(STATISTICS))
            lessons = [TaughtLesson.from_arrays(bundle.arrays(lesson_name(n))) for n in range(len(manifest.lessons))]
        except (KeyError, ValueError) as error:
            raise BundleError(f"{bundle.path}: {error}; {EXPORT_AGAIN}") from error
        model = load_pooled(bundle)
        tasks = [
            Task(info.labels, detector, rule, adapter)
            for info, detector, rule, adapter in zip_longest(
                manifest.tasks, model.detectors, bundle.rule.tasks, model.adapters
            )
        ]
        extensions = iter(extension for _, extension in model.extensions)
        done = [
            Taught(
                lesson,
                None if info.task is None else tasks[info.task],
                info.extends,
                next(extensions) if info.extends and extension_name(number) in manifest.files else None,
            )
            for number, (lesson, info) in enumerate(zip(lessons, manifest.lessons, strict=True))
        ]
        examples = [
            Examples(
                {label: lesson.of(label) for label in lesson.labels},
                {label: tuple(names) for label, names in lesson.examples().items()},
                info.taught_by,
                info.taught_at,
            )
            for lesson, info in zip(lessons, manifest.lessons, strict=True)
        ]
        taught = {info.task for info in manifest.lessons}
        run = tuple(task for number, task in enumerate(tasks) if number not in taught)
        if sum(len(task.labels) for task in run) != len(teachable.factors.classes):
            raise BundleError(f"{bundle.path / STATISTICS}: not the classes of the bundle; {EXPORT_AGAIN}")
        groups = tuple(group for _, group in model.consolidated)
        return cls(run, teachable, tuple(examples), _accumulated(done), model.weight, groups, model.classifier)

    @property
    def dim(self) -> int:
        return self.teachable.factors.projection.dim

    @property
    def run_labels(self) -> tuple[str, ...]:
        """The classes that the run learned."""
        return tuple(label for task in self.tasks for label in task.labels)

    @property
    def labels(self) -> tuple[str, ...]:
        """All classes, in the order of their columns."""
        return tuple(dict.fromkeys([*self.run_labels, *(label for lesson in self.lessons for label in lesson.images)]))

    def examples(self) -> dict[str, str]:
        """digest -> label, of everything that was taught."""
        return {name: label for lesson in self.lessons for label, names in lesson.digests.items() for name in names}

    @property
    def adapted(self) -> tuple[Consolidated, ...]:
        """The adapters that still apply: those of which no example was taken out or relabelled since.

        An adapter cannot be learned without an example in closed form. So a change that takes one out leaves the
        classes as they were taught, which is exact, until they are consolidated again.
        """
        now = self.examples()
        return tuple(
            group
            for group in self.consolidated
            if all(
                now.get(name) == label
                for label, names in zip(group.labels, group.digests, strict=True)
                for name in names
            )
        )

    def taught(self, more: Examples) -> Curriculum:
        """With one more lesson; examples that were taught before are left out of it."""
        for label, rows in more.vectors.items():
            if rows.shape[1] != self.dim or not np.isfinite(rows).all():
                raise TeachError(f"{label!r}: vectors {rows.shape}; allowed: [n, {self.dim}], finite numbers")
        if twice := more.ambiguous():
            digest, (one, other, *_) = next(iter(twice.items()))
            raise TeachError(f"image {digest[:12]} has two labels, {one!r} and {other!r}; allowed: one label per image")
        known = self.examples()
        fresh = more.without(frozenset(known))
        if fresh is None:
            raise TeachError(f"{sum(more.images.values())} examples, all of them taught before; allowed: new ones")
        for label in fresh.images:
            if label not in self.labels:
                check_label(label)
        short = {label: n for label, n in fresh.images.items() if n < LEAST and label not in self.labels}
        if short:
            got = ", ".join(f"{label!r} ({count})" for label, count in short.items())
            raise TeachError(f"too few examples of {got}; allowed: at least {LEAST} of a new class")
        return replace(self, lessons=(*self.lessons, fresh), classifier=None)

    def without_examples(self, digests: frozenset[str]) -> Curriculum:
        """Without some examples. A taught class of which none is left is forgotten; too few are an error."""
        after = self._changed([lesson.without(digests) for lesson in self.lessons])
        for label, count in after.too_few().items():
            raise TeachError(
                f"{count} example of {label!r} would be left; allowed: at least {LEAST}, or delete the class"
            )
        return after

    def thinned(self, digests: frozenset[str]) -> frozenset[str]:
        """The taught classes that could not be learned as new ones any more without some examples: too few are left in
        their first lesson."""
        return frozenset(self._changed([lesson.without(digests) for lesson in self.lessons]).too_few())

    def too_few(self) -> dict[str, int]:
        """The taught classes with too few examples in their first lesson, and how many these are."""
        first: dict[str, int] = {}
        for lesson in self.lessons:
            first = {**lesson.images, **first}
        return {label: count for label, count in first.items() if count < LEAST and label not in self.run_labels}

    def forgot(self, label: str) -> Curriculum:
        """Without a class, as if it had never been learned."""
        self._place(label)
        if len(self.labels) == 1:
            raise TeachError(f"{label!r} is the only class; allowed: keep at least one class")
        gone = frozenset(name for name, own in self.examples().items() if own == label)
        if label not in self.run_labels:
            return self._changed([lesson.without(gone) for lesson in self.lessons])
        place = self.run_labels.index(label)
        kept = [task if label not in task.labels else _without_column(task, label) for task in self.tasks]
        tasks = tuple(task for task in kept if task is not None)
        if not tasks:
            raise TeachError(f"{label!r} is the only class that the run learned; allowed: keep at least one")
        teachable = replace(self.teachable, factors=self.teachable.factors.without(place))
        lessons = tuple(left for lesson in self.lessons if (left := lesson.without(gone)) is not None)
        # Every lesson started from the statistics of the run, which have changed.
        return replace(self, tasks=tasks, teachable=teachable, lessons=lessons, done=(), classifier=None)

    def renamed(self, label: str, new: str) -> Curriculum:
        """With another name for a class; nothing has to be learned again."""
        self._place(label)
        check_label(new)
        if new in self.labels:
            raise TeachError(f"{new!r} is a class already; allowed: a new name, or merge the classes")
        names = {label: new}
        tasks = tuple(replace(task, labels=_mapped(task.labels, names)) for task in self.tasks)
        done = tuple(
            Taught(
                replace(each.lesson, labels=_mapped(each.lesson.labels, names)),
                each.task and replace(each.task, labels=_mapped(each.task.labels, names)),
                _mapped(each.extends, names),
                each.extension,
            )
            for each in self.done
        )
        lessons = tuple(lesson.relabelled(names) for lesson in self.lessons)
        groups = tuple(replace(each, labels=_mapped(each.labels, names)) for each in self.consolidated)
        return replace(self, tasks=tasks, lessons=lessons, done=done, consolidated=groups)

    def merged(self, label: str, into: str) -> Curriculum:
        """With the examples of a taught class as examples of another one, as if they had been taught so."""
        self._place(label)
        self._place(into)
        if label in self.run_labels:
            raise TeachError(
                f"{label!r} was learned by a run, which kept no example of it; allowed: merge a taught class into "
                "it, and to rename it then"
            )
        if label == into:
            raise TeachError(f"{label!r} cannot be merged into itself; allowed: two classes")
        return self._changed([lesson.relabelled({label: into}) for lesson in self.lessons])

    def _place(self, label: str) -> int:
        if label not in self.labels:
            meant = did_you_mean(label, self.labels)
            raise TeachError(f"no class {label!r}; allowed: {', '.join(map(repr, self.labels))}{meant}")
        return self.labels.index(label)

    def _changed(self, lessons: Sequence[Examples | None]) -> Curriculum:
        """With other lessons; those before the first one that differs need not be learned again."""
        same = 0
        for before, after in zip(self.lessons, lessons, strict=True):
            if after is None or before.digests != after.digests:
                break
            same += 1
        done = _complete(self.done[:same])
        kept = self.classifier if same == len(self.lessons) else None
        return replace(self, lessons=tuple(filter(None, lessons)), done=done, classifier=kept)


def _complete(done: Sequence[Taught]) -> tuple[Taught, ...]:
    """The first lessons, up to one that is to be learned again: its extension was dropped when later lessons made it
    useless, and they are changed now."""
    count = len(done)
    while count and any(
        labels and each.extension is None for each, labels in zip(done[:count], in_use(done[:count]), strict=True)
    ):
        count -= 1
    return tuple(done[:count])


def _accumulated(done: Sequence[Taught]) -> tuple[Taught, ...]:
    """The first lessons, up to an extension that has no examples of lessons before: bundles had one per lesson once."""
    for each, labels in zip(done, in_use(done), strict=True):
        if each.extension is not None and labels != set(np.array(each.extends)[each.extension.used].tolist()):
            return tuple(done[: next(number for number, one in enumerate(done) if one.extends)])
    return tuple(done)


def check_label(label: str) -> None:
    """Raise a TeachError unless a new class may have this name."""
    try:
        check_new_label(label)
    except ValueError as error:
        raise TeachError(str(error)) from None


def _without_column(task: Task, label: str) -> Task | None:
    """A task without one of its classes; the columns of the others and the scores stay as they are."""
    kept = np.array([number for number, other in enumerate(task.labels) if other != label])
    if not len(kept):
        return None
    rule = task.rule.model_copy(update={"classes": len(kept)})
    detector = replace(
        task.detector,
        class_ids=task.detector.class_ids[kept],
        weights=task.detector.weights[kept],
        bias=task.detector.bias[kept],
    )
    adapter = task.adapter and task.adapter.of_classes(kept)
    return Task(tuple(task.labels[number] for number in kept), detector, rule, adapter)


def _mapped(labels: Sequence[str], names: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(names.get(label, label) for label in labels)
