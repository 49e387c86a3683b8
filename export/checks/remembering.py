"""A new bundle becomes the current one of a shelf only if it remembers: earlier tasks answer as before."""

import os
from pathlib import Path

import numpy as np

from export.checks.trunk_remembering import what_pooled_forgot
from export.graph.cascade import AGREEMENT
from export.graph.directory import move_into_place
from export.graph.evidence import Evidence
from export.graph.session import GraphQuery, is_large, load_nodes, open_written
from serving.bundle.decision import NETWORK_NAMES, decide
from serving.bundle.layout import parts_of
from serving.bundle.manifest import Bundle, load_bundle
from serving.bundle.shelf import Shelf


class PublishError(Exception):
    """A bundle that must not be published; the message says what it would break."""


def put_on_shelf(fresh: Path, shelf: Shelf, before: Bundle | None, evidence: Evidence) -> Path:
    """Move a written bundle to the shelf and make it the current one; raises a PublishError if it forgot anything."""
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
    """Raise a PublishError unless every earlier task gives the same bits as before and known images are accepted as
    before."""
    old, new = before.manifest, after.manifest
    if [task.labels for task in new.tasks[: len(old.tasks)]] != [task.labels for task in old.tasks]:
        raise PublishError(f"version {old.version} has tasks that the new bundle lacks or has in another order")
    if before.rule.score != after.rule.score:
        raise PublishError(
            f"version {old.version} decides by {before.rule.score}, the new bundle by {after.rule.score}; "
            f"allowed: --decision {before.rule.score}"
        )
    for task, (rule, own) in enumerate(zip(before.rule.tasks, after.rule.tasks, strict=False)):
        if rule != own:
            raise PublishError(f"task {task}: its stored scores differ from those of version {old.version}")
    before.check()
    if old.trunk or new.trunk:
        if forgot := what_pooled_forgot(before, after, evidence):
            raise PublishError(forgot)
        return
    for precision in old.precisions:
        if precision not in new.precisions:
            raise PublishError(f"version {old.version} has {precision}; the new bundle has {', '.join(new.precisions)}")
        _compare_weights(before, after, precision)
        _compare_answers(before, after, precision, evidence)


def _compare_weights(before: Bundle, after: Bundle, precision: str) -> None:
    """The weight files of the earlier tasks and the shared one."""
    old, new = before.manifest, after.manifest
    owners = {name: f"task {task.task}" for task in old.tasks for name in task.parts}
    for name in parts_of(old.files, precision):
        if new.files.get(name) != old.files[name]:
            raise PublishError(f"{owners.get(name, 'all tasks')}: {name} differs from version {old.version}")


def _compare_answers(before: Bundle, after: Bundle, precision: str, evidence: Evidence) -> None:
    images = [before.golden.pixels, evidence.pixels[evidence.tasks < len(before.manifest.tasks)]]
    questions = [GraphQuery(pixels) for pixels in images if len(pixels)]
    # Both are run in the same way, since they are compared bit by bit, and one after the other, to save memory.
    large = any(is_large(load_nodes(bundle.path, precision)) for bundle in (before, after))
    old, new = (open_written(bundle.path, precision, large=large).run(questions) for bundle in (before, after))
    classes = len(before.manifest.labels)
    # With a cascade, the rotations that a task sees depend on the other tasks: only its weights can be compared.
    alike = all(bundle.manifest.cascade.candidates is None for bundle in (before, after))
    for question, earlier, later in zip(questions, old, new, strict=True):
        for name in NETWORK_NAMES if alike else ():
            differing = earlier[name] != later[name][:, :classes]
            if differing.any():
                task = int(before.rule.task_of_class[np.argwhere(differing)[0][1]])
                raise PublishError(f"{precision}: task {task} gives other {name} than in {before.manifest.version}")
        known, still_known = decide(earlier, before.rule).known, decide(later, after.rule).known
        lost, allowed = int((known & ~still_known).sum()), 0 if alike else int((1 - AGREEMENT) * len(question.pixels))
        if lost > allowed:
            raise PublishError(
                f"{precision}: {lost} of {int(known.sum())} known images would be called unknown; allowed: {allowed}"
            )
