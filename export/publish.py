"""A new bundle takes its place on the shelf only if it remembers: what was known before is answered as before."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from export.cascade import AGREEMENT
from export.evidence import Evidence
from export.opened import Question, is_large, open_written
from export.part import load_nodes
from export.write import move_into_place
from serving.bundle import Bundle, load_bundle
from serving.decision import NETWORK_NAMES, decide
from serving.layout import parts_of
from serving.shelf import Shelf


class PublishError(Exception):
    """A bundle that servers must not take; the message says what it would break."""


def publish(fresh: Path, shelf: Shelf, before: Bundle | None, evidence: Evidence) -> Path:
    """Put a written bundle on the shelf and let it be the current one, unless it forgot; where it is."""
    bundle = load_bundle(fresh)
    if before is not None:
        check_remembers(before, bundle, evidence)
    place = shelf.folder / bundle.manifest.version
    if place.exists():
        load_bundle(place).check()
    else:
        move_into_place(fresh, place)
    shelf.point_at(place.name)
    return Path(os.path.abspath(place))


def check_remembers(before: Bundle, after: Bundle, evidence: Evidence) -> None:
    """Every task of the bundle before answers to the bit as it did, and known images are accepted as they were."""
    old, new = before.manifest, after.manifest
    if [task.labels for task in new.tasks[: len(old.tasks)]] != [task.labels for task in old.tasks]:
        raise PublishError(f"version {old.version} has tasks that the new bundle has not, or not in the same order")
    if before.rule.score != after.rule.score:
        raise PublishError(
            f"version {old.version} decides by {before.rule.score}, the new bundle by {after.rule.score}; "
            f"allowed: --decision {before.rule.score}"
        )
    for task, (rule, own) in enumerate(zip(before.rule.tasks, after.rule.tasks, strict=False)):
        if rule != own:
            raise PublishError(f"task {task}: its validation scores are not those of version {old.version}")
    before.check()
    for precision in old.precisions:
        if precision not in new.precisions:
            raise PublishError(f"version {old.version} has {precision}; the new bundle has {', '.join(new.precisions)}")
        _compare_weights(before, after, precision)
        _compare_answers(before, after, precision, evidence)


def _compare_weights(before: Bundle, after: Bundle, precision: str) -> None:
    """The files of the earlier tasks, and the one that they share."""
    old, new = before.manifest, after.manifest
    owners = {name: f"task {task.task}" for task in old.tasks for name in task.parts}
    for name in parts_of(old.files, precision):
        if new.files.get(name) != old.files[name]:
            raise PublishError(f"{owners.get(name, 'all tasks')}: {name} is not what it was in version {old.version}")


def _compare_answers(before: Bundle, after: Bundle, precision: str, evidence: Evidence) -> None:
    images = [before.golden.pixels, evidence.pixels[evidence.tasks < len(before.manifest.tasks)]]
    questions = [Question(pixels) for pixels in images if len(pixels)]
    # Both in the same way, since they are compared to the bit, and one after the other, to need the memory of one.
    large = any(is_large(load_nodes(bundle.path, precision)) for bundle in (before, after))
    old, new = (open_written(bundle.path, precision, large=large).ask(questions) for bundle in (before, after))
    classes = len(before.manifest.labels)
    # With a cascade, how often a task sees an image depends on the other tasks; its weights alone cannot change then.
    alike = all(bundle.manifest.cascade.candidates is None for bundle in (before, after))
    for question, said, says in zip(questions, old, new, strict=True):
        for name in NETWORK_NAMES if alike else ():
            differing = said[name] != says[name][:, :classes]
            if differing.any():
                task = int(before.rule.task_of_class[np.argwhere(differing)[0][1]])
                raise PublishError(f"{precision}: task {task} gives other {name} than in {before.manifest.version}")
        known, knows = decide(said, before.rule).known, decide(says, after.rule).known
        lost, allowed = int((known & ~knows).sum()), 0 if alike else int((1 - AGREEMENT) * len(question.pixels))
        if lost > allowed:
            raise PublishError(
                f"{precision}: {lost} of {int(known.sum())} known images would be refused as unknown; allowed {allowed}"
            )
