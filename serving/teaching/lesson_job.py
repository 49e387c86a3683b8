"""Learning what people have labelled: the lessons of the served bundle become those of the labels in the store.

An example in the store counts as it is labelled there now. Examples of earlier lessons that the store no longer has
stay as they were taught.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from serving.bundle.model import BundleModel
from serving.bundle.old_classes import MAX_LOSS, ClassLoss
from serving.inference.loaded import TRUNK_KEY
from serving.quarantine.decoded import item_pixels
from serving.quarantine.records import Example, Item
from serving.teaching.curriculum import LEAST, Curriculum, Examples
from serving.teaching.errors import TeachError
from serving.teaching.jobs import JobRecord
from serving.teaching.learning import Knowledge, learn
from serving.teaching.lesson_plan import ShortClass, plan_lesson
from serving.teaching.trial import Trial, try_out
from serving.teaching.writing import compose, put_beside, remove_unfinished

if TYPE_CHECKING:
    from serving.quarantine.store import Store

BATCH = 16
MOST_WAITING = 2000
"""Unlabelled images at most that a candidate is tried on, the latest ones."""

Progress = Callable[[float], None]


class Shows(Protocol):
    """Something that shows how far a job is."""

    def part(self, step: str, start: float, end: float) -> Progress: ...


@dataclass(frozen=True)
class Wanted:
    """The request of a learn job: changes of classes and images, and which labelled examples are learned."""

    forget: tuple[str, ...] = ()
    rename: dict[str, str] = field(default_factory=dict)
    merge: dict[str, str] = field(default_factory=dict)
    examples: bool = True
    """Whether labelled examples are learned; a change of a class alone leaves them waiting."""
    only: tuple[str, ...] | None = None
    """Only examples of these classes are learned, and none is taken out."""
    relabel: dict[str, str] = field(default_factory=dict)
    """Labels of examples that change when the result is published, of classes that the model does not have."""
    delete: tuple[int, ...] = ()
    """Images that are deleted when the result is published."""

    @classmethod
    def of(cls, request: Mapping[str, Any]) -> Wanted:
        return cls(
            tuple(request.get("forget", ())),
            dict(request.get("rename", {})),
            dict(request.get("merge", {})),
            bool(request.get("examples", True)),
            None if request.get("only") is None else tuple(request["only"]),
            dict(request.get("relabel", {})),
            tuple(request.get("delete", ())),
        )


def learn_labels(
    job: JobRecord, store: Store, model: BundleModel, shelf: Path, display: Shows
) -> tuple[dict[str, Any], str]:
    """The result of a learn job, and the version of the candidate, which is on the shelf then."""
    seconds: dict[str, float] = {}
    clock = time.monotonic

    started = clock()
    remove_unfinished(shelf)
    before = Curriculum.of(model.bundle)
    wanted = Wanted.of(job.request)
    after = changed(before, wanted)
    short: tuple[ShortClass, ...] = ()
    if wanted.examples:
        progress = display.part("reading examples", 0.05, 0.3)
        after, short = with_labels(after, store, model, wanted.only, job.who, progress)
    if (after.labels, after.examples()) == (before.labels, before.examples()):
        raise TeachError("nothing to learn: the model knows all examples as they are labelled; allowed: new ones")
    seconds["examples"], started = clock() - started, clock()
    # A class with another name is not a new class.
    served = learn(changed(before, Wanted(rename=wanted.rename)))
    names = sorted(set(after.labels) - set(before.labels))
    what = f"learning {', '.join(names[:4])}{' ...' if len(names) > 4 else ''}" if names else "learning"
    knowledge = learn(after, display.part(what, 0.3, 0.55))
    seconds["learning"], started = clock() - started, clock()
    waiting = waiting_vectors(store, model)
    rules = model.bundle.rule, knowledge.rule(model.bundle.rule)
    comparing = display.part("comparing with the served model", 0.55, 0.9)
    trial = try_out(served, knowledge, rules, waiting, comparing, wanted.merge)
    seconds["comparison"], started = clock() - started, clock()
    display.part("writing the bundle", 0.9, 1.0)
    place = put_beside(compose(model, knowledge, trial.taught), model.bundle, shelf)
    seconds["writing"] = clock() - started
    deleted = sorted({*wanted.forget, *before.labels} - {*after.labels, *wanted.rename, *wanted.merge})
    found = summary(wanted, deleted, knowledge, trial, seconds)
    return {**found, "too_few": [each._asdict() for each in short]}, place.name


def changed(curriculum: Curriculum, wanted: Wanted) -> Curriculum:
    """With classes forgotten, renamed and merged."""
    for label in wanted.forget:
        curriculum = curriculum.forgot(label)
    for label, new in wanted.rename.items():
        curriculum = curriculum.renamed(label, new)
    for label, into in wanted.merge.items():
        curriculum = curriculum.merged(label, into)
    return curriculum


def with_labels(
    curriculum: Curriculum, store: Store, model: BundleModel, only: Sequence[str] | None, who: str, progress: Progress
) -> tuple[Curriculum, tuple[ShortClass, ...]]:
    """With one more lesson of what is labelled and not learned, and without what was withdrawn or relabelled since;
    and the classes that are left as they are, because they have too few examples."""
    labelled = {each.digest: each for each in store.examples() if each.label is not None}
    taught = curriculum.examples()
    gone: set[str] = set()
    if only is not None:
        labelled = {digest: each for digest, each in labelled.items() if each.label in only}
    else:
        gone = {*withdrawn(taught, labelled, store)}
    waiting = [each for digest, each in labelled.items() if digest not in taught or digest in gone]
    vectors = encoded_items(store, model, [each.id for each in waiting], progress)
    if waiting and not vectors:
        raise TeachError(f"none of {len(waiting)} examples can be read; allowed: images that are there and undamaged")
    plan = plan_lesson(taught, gone, [each for each in waiting if each.id in vectors], curriculum.run_labels)
    if plan.empty and plan.short:
        raise TeachError(f"too few examples: {plan.reason}; allowed: at least {LEAST} of each class that is learned")
    given: dict[str, list[tuple[str, NDArray[np.float32]]]] = {}
    for each in plan.fresh:
        given.setdefault(str(each.label), []).append((each.digest, vectors[each.id]))
    moved = _moved(curriculum, plan.gone)
    for label, digest, vector in moved:
        given.setdefault(label, []).append((digest, vector))
    if out := plan.gone | {digest for _, digest, _ in moved}:
        curriculum = curriculum.without_examples(out)
    if given:
        at = datetime.now(UTC).isoformat(timespec="seconds")
        people = sorted({each.labelled_by for each in plan.fresh if each.labelled_by}) or [who]
        curriculum = curriculum.taught(Examples.of(given, ", ".join(people)[:200], at))
    return curriculum, plan.short


def _moved(curriculum: Curriculum, gone: frozenset[str]) -> list[tuple[str, str, NDArray[np.float32]]]:
    """The label, digest and vector of the examples that are left of classes whose first lesson has too few of them:
    with all other examples of their class, they are enough for a new lesson."""
    thin = curriculum.thinned(gone) if gone else frozenset()
    return [
        (label, digest, vector)
        for lesson in curriculum.lessons
        for label in thin & {*lesson.images}
        for digest, vector in zip(lesson.digests[label], lesson.vectors[label], strict=True)
        if digest not in gone
    ]


def withdrawn(taught: Mapping[str, str], labelled: Mapping[str, Example], store: Store) -> list[str]:
    """Digests that were taught with another label than the store has now."""
    missing = [digest for digest in taught if digest not in labelled]
    present = {each.digest for each in store.with_digests(missing) if each.state != "learned"}
    relabelled = [digest for digest, label in taught.items() if digest in labelled and labelled[digest].label != label]
    return [*present, *relabelled]


def encoded_items(
    store: Store, model: BundleModel, ids: Sequence[int], progress: Progress = lambda share: None
) -> dict[int, NDArray[np.float32]]:
    """The vector of each item: as it was stored if this trunk made it, else by encoding the image again."""
    trunk = model.manifest.trunk
    assert trunk is not None
    found: dict[int, NDArray[np.float32]] = {}
    again: list[Item] = []
    for item in store.items(ids=ids):
        if item.damage is not None:
            continue
        if item.answer.get(TRUNK_KEY) == trunk.sha256 and item.features.shape == (trunk.dim,):
            found[item.id] = item.features
        else:
            again.append(item)
    for start in range(0, len(again), BATCH):
        progress(start / len(again))
        pixels = {item.id: item_pixels(store, item, model.manifest.image) for item in again[start : start + BATCH]}
        readable = {item_id: one for item_id, one in pixels.items() if one is not None}
        if readable:
            found |= dict(zip(readable, model.encode(np.stack(list(readable.values()))), strict=True))
    return found


def waiting_vectors(store: Store, model: BundleModel) -> NDArray[np.float32]:
    """The vectors of unlabelled images that this trunk has encoded, the latest ones."""
    trunk = model.manifest.trunk
    assert trunk is not None
    found = [
        item.features
        for item in store.items(state="new", latest=MOST_WAITING)
        if item.damage is None and item.answer.get(TRUNK_KEY) == trunk.sha256 and item.features.shape == (trunk.dim,)
    ]
    return np.stack(found) if found else np.empty((0, trunk.dim), np.float32)


def summary(
    wanted: Wanted, deleted: Sequence[str], knowledge: Knowledge, trial: Trial, seconds: Mapping[str, float]
) -> dict[str, Any]:
    """The result of a job as it is stored."""
    measured = [each for each in trial.classes if each.of]
    images = sum(each.of for each in measured)
    old_images = sum(each.images for each in trial.old.measured)
    return {
        "classes": [asdict(each) for each in trial.classes],
        "accuracy_before": sum(each.right_before for each in measured) / images if images else None,
        "accuracy_after": sum(each.right_after for each in measured) / images if images else None,
        "deleted": list(deleted),
        "renamed": wanted.rename,
        "merged": wanted.merge,
        "old_classes": {
            "images": old_images,
            "before": sum(each.before for each in trial.old.measured) / old_images if old_images else None,
            "after": sum(each.after for each in trial.old.measured) / old_images if old_images else None,
            "worse": [_loss(each) for each in trial.old.measured if each.label in trial.worse],
            "changed": [_loss(each) for each in trial.old.measured if each.before != each.after],
            "missing": list(trial.old.missing),
        },
        "known_images": {**asdict(trial.lost_known), "too_many": trial.lost_known.too_many},
        "gate": trial.gate,
        "max_loss": MAX_LOSS,
        "waiting_unknown": trial.waiting,
        "waiting_known": sum(trial.waiting_known.values()),
        "waiting_by_class": trial.waiting_known,
        "rejects_unknown": trial.rejects_unknown,
        "labels": list(knowledge.labels),
        "seconds": {step: round(value, 3) for step, value in seconds.items()},
    }


def _loss(each: ClassLoss) -> dict[str, Any]:
    return {**asdict(each), "taken_for": [list(pair) for pair in each.taken_for]}
