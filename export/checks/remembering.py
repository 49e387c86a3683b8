"""A new bundle becomes the current one of a shelf only if it remembers: earlier tasks answer as before, and earlier
classes are still recognised."""

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from export.checks.trunk_remembering import compare_pooled
from export.graph.cascade import AGREEMENT
from export.graph.evidence import Evidence
from export.graph.notes import note
from export.graph.session import GraphQuery, is_large, load_nodes, open_written
from serving.bundle.decision import NETWORK_NAMES, decide
from serving.bundle.directory import move_into_place
from serving.bundle.layout import parts_of
from serving.bundle.manifest import Bundle, load_bundle
from serving.bundle.old_classes import MAX_LOSS, compare_classes
from serving.bundle.shelf import Shelf


class PublishError(Exception):
    """A bundle that must not be published; the message says what it would break."""


def put_on_shelf(
    fresh: Path, shelf: Shelf, before: Bundle | None, evidence: Evidence, max_loss: float = MAX_LOSS
) -> Path:
    """Move a written bundle to the shelf and make it the current one; raises a PublishError if it forgot anything."""
    bundle = load_bundle(fresh)
    if before is not None:
        check_remembers(before, bundle, evidence, max_loss)
    place = shelf.folder / bundle.manifest.version
    if place.exists():
        load_bundle(place).check()
    else:
        move_into_place(fresh, place)
    shelf.point_at(place.name, None if before is None else before.path.resolve().name)
    return Path(os.path.abspath(place))


def check_remembers(before: Bundle, after: Bundle, evidence: Evidence, max_loss: float = MAX_LOSS) -> None:
    """Raise a PublishError unless every earlier task gives the same bits as before, known images are accepted as
    before, and no earlier class loses more than `max_loss` points of CIL to other classes."""
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
        forgot, answers = compare_pooled(before, after, evidence)
        if forgot:
            raise PublishError(forgot)
        of_old = evidence.class_ids[evidence.class_ids < len(old.labels)][: answers.shape[1]]
        _check_old_classes(before, after, "fp32", of_old, answers, max_loss, evidence.kind)
        return
    for precision in old.precisions:
        if precision not in new.precisions:
            raise PublishError(f"version {old.version} has {precision}; the new bundle has {', '.join(new.precisions)}")
        _compare_weights(before, after, precision)
        _compare_answers(before, after, precision, evidence, max_loss)


def _compare_weights(before: Bundle, after: Bundle, precision: str) -> None:
    """The weight files of the earlier tasks and the shared one."""
    old, new = before.manifest, after.manifest
    owners = {name: f"task {task.task}" for task in old.tasks for name in task.parts}
    for name in parts_of(old.files, precision):
        if new.files.get(name) != old.files[name]:
            raise PublishError(f"{owners.get(name, 'all tasks')}: {name} differs from version {old.version}")


def _compare_answers(before: Bundle, after: Bundle, precision: str, evidence: Evidence, max_loss: float) -> None:
    classes = len(before.manifest.labels)
    of_old = evidence.class_ids < classes
    images = [before.golden.pixels, evidence.pixels[of_old]]
    questions = [GraphQuery(pixels) for pixels in images if len(pixels)]
    # Both are run in the same way, since they are compared bit by bit, and one after the other, to save memory.
    large = any(is_large(load_nodes(bundle.path, precision)) for bundle in (before, after))
    old, new = (open_written(bundle.path, precision, large=large).run(questions) for bundle in (before, after))
    answers = np.empty((2, 0), int)
    # With a cascade, the rotations that a task sees depend on the other tasks: only its weights can be compared.
    alike = all(bundle.manifest.cascade.candidates is None for bundle in (before, after))
    for question, earlier, later in zip(questions, old, new, strict=True):
        for name in NETWORK_NAMES if alike else ():
            differing = earlier[name] != later[name][:, :classes]
            if differing.any():
                task = int(before.rule.task_of_class[np.argwhere(differing)[0][1]])
                raise PublishError(f"{precision}: task {task} gives other {name} than in {before.manifest.version}")
        verdicts = decide(earlier, before.rule), decide(later, after.rule)
        known, still_known = (each.known for each in verdicts)
        lost, allowed = int((known & ~still_known).sum()), 0 if alike else int((1 - AGREEMENT) * len(question.pixels))
        if lost > allowed:
            raise PublishError(
                f"{precision}: {lost} of {int(known.sum())} known images would be called unknown; allowed: {allowed}"
            )
        if question.pixels is not before.golden.pixels:
            answers = np.stack([each.class_id for each in verdicts])
    _check_old_classes(before, after, precision, evidence.class_ids[of_old], answers, max_loss)


def _check_old_classes(
    before: Bundle,
    after: Bundle,
    precision: str,
    class_ids: NDArray[np.integer],
    answers: NDArray[np.integer],
    max_loss: float,
    kind: str = "validation",
) -> None:
    """Compare the answers [2, n] of both bundles to images of earlier classes; `kind` is what these were to the run."""
    if len(after.manifest.tasks) == len(before.manifest.tasks):
        return
    found = compare_classes(after.manifest.labels, len(before.manifest.labels), class_ids, *answers)
    harmed = "".join(f"; {each}" for each in found.worse(min(max_loss, MAX_LOSS)))
    note(f"{precision}: {found.summary(kind)}{harmed}")
    if worse := found.worse(max_loss):
        raise PublishError(
            f"{precision}: earlier classes lose more than {max_loss:g} points of CIL: "
            f"{'; '.join(map(str, worse))}. Allowed: another --max-loss, or --force"
        )
