"""A new bundle becomes the current one of a shelf only if it remembers: earlier tasks answer as before, and earlier
classes are still recognised."""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from export.checks.lesson_remembering import lost_lessons
from export.checks.trunk_remembering import compare_pooled
from export.graph.evidence import Evidence
from export.graph.notes import note
from export.graph.session import GraphQuery, is_large, load_nodes, open_written
from serving.bundle.decision import NETWORK_NAMES, Array, Rule, Verdicts, decide
from serving.bundle.directory import move_into_place
from serving.bundle.layout import parts_of
from serving.bundle.manifest import Bundle, load_bundle
from serving.bundle.old_classes import MAX_LOSS, LostKnown, compare_classes
from serving.bundle.shelf import Shelf

ROUNDING = 1e-3
"""The share of a task's largest logit by which rounding may change it if another decision scales it."""


class PublishError(Exception):
    """A bundle that must not be published; the message states why."""


@dataclass(frozen=True)
class Allowed:
    """Changes by a new bundle that are allowed, but refused by default."""

    max_loss: float = MAX_LOSS
    """Points of CIL that an earlier class may lose to other classes."""
    unknown: bool = False
    """Whether more known images than by chance may be called unknown."""
    decision: bool = False
    """Whether it may decide by another score; all other checks stay."""


DEFAULT = Allowed()


def put_on_shelf(
    fresh: Path, shelf: Shelf, before: Bundle | None, evidence: Evidence, allowed: Allowed = DEFAULT
) -> Path:
    """Move a written bundle to the shelf and make it the current one; raises a PublishError if it forgot anything."""
    bundle = load_bundle(fresh)
    if before is not None:
        check_remembers(before, bundle, evidence, allowed)
    place = shelf.folder / bundle.manifest.version
    if place.exists():
        load_bundle(place).check()
    else:
        move_into_place(fresh, place)
    shelf.point_at(place.name, None if before is None else before.path.resolve().name)
    return Path(os.path.abspath(place))


def check_remembers(before: Bundle, after: Bundle, evidence: Evidence, allowed: Allowed = DEFAULT) -> None:
    """Raise a PublishError unless everything that was taught is there, every earlier task gives the same bits as
    before, no larger share than alpha of the known images is called unknown, and no earlier class loses more points of
    CIL to other classes than allowed.

    If the decision may be another one and is, the earlier tasks only have to give the same logits, but
    for the scale and shift that belong to a decision.
    """
    old, new = before.manifest, after.manifest
    if lost := lost_lessons(old, new):
        raise PublishError(lost)
    if [task.labels for task in new.tasks[: len(old.tasks)]] != [task.labels for task in old.tasks]:
        raise PublishError(f"version {old.version} has tasks that the new bundle lacks or has in another order")
    another = before.rule.score != after.rule.score
    if another and not allowed.decision:
        raise PublishError(
            f"version {old.version} decides by {before.rule.score}, the new bundle by {after.rule.score}; "
            f"allowed: --decision {before.rule.score} or --decision {after.rule.score}"
        )
    for task, (rule, own) in enumerate(zip(before.rule.tasks, after.rule.tasks, strict=False)):
        if rule != own and not another:
            raise PublishError(f"task {task}: its stored scores differ from those of version {old.version}")
    before.check()
    if old.trunk or new.trunk:
        forgot, answers = compare_pooled(before, after, evidence, allowed.unknown)
        if forgot:
            raise PublishError(forgot)
        of_old = evidence.class_ids[evidence.class_ids < len(old.labels)][: answers.shape[1]]
        _check_old_classes(before, after, "fp32", of_old, answers, allowed.max_loss, evidence.kind)
        return
    for precision in old.precisions:
        if precision not in new.precisions:
            raise PublishError(f"version {old.version} has {precision}; the new bundle has {', '.join(new.precisions)}")
        if not another:
            # The detectors of a task's part are those that the decision needs.
            _compare_weights(before, after, precision)
        _compare_answers(before, after, precision, evidence, allowed)


def _compare_weights(before: Bundle, after: Bundle, precision: str) -> None:
    """The weight files of the earlier tasks and the shared one."""
    old, new = before.manifest, after.manifest
    owners = {name: f"task {task.task}" for task in old.tasks for name in task.parts}
    for name in parts_of(old.files, precision):
        if new.files.get(name) != old.files[name]:
            raise PublishError(f"{owners.get(name, 'all tasks')}: {name} differs from version {old.version}")


def _compare_answers(before: Bundle, after: Bundle, precision: str, evidence: Evidence, allowed: Allowed) -> None:
    classes = len(before.manifest.labels)
    of_old = evidence.class_ids < classes
    images = [before.golden.pixels, evidence.pixels[of_old]]
    questions = [GraphQuery(pixels) for pixels in images if len(pixels)]
    # Both are run in the same way, since they are compared bit by bit, and one after the other, to save memory.
    large = any(is_large(load_nodes(bundle.path, precision)) for bundle in (before, after))
    old, new = (open_written(bundle.path, precision, large=large).run(questions) for bundle in (before, after))
    # With a cascade, the rotations that a task sees depend on the other tasks: only its weights can be compared.
    alike = all(bundle.manifest.cascade.candidates is None for bundle in (before, after))
    another = before.rule.score != after.rule.score
    for earlier, later in zip(old, new, strict=True) if alike else ():
        for name in NETWORK_NAMES[:1] if another else NETWORK_NAMES:
            task = (_other_logits if another else _other_bits)(earlier[name], later[name][:, :classes], before.rule)
            if task is not None:
                raise PublishError(f"{precision}: task {task} gives other {name} than in {before.manifest.version}")
    answers = np.empty((2, 0), int)
    if of_old.any():
        then, now = decide(old[-1], before.rule), decide(new[-1], after.rule)
        _check_known(then, now, after.rule.alpha, f"{precision}: ", evidence.kind, allowed.unknown)
        answers = np.stack([then.class_id, now.class_id])
    else:
        note(
            f"{precision}: no {evidence.kind} image of an earlier task is available: answers to them were not compared"
        )
    _check_old_classes(before, after, precision, evidence.class_ids[of_old], answers, allowed.max_loss, evidence.kind)


def _other_bits(old: Array, new: Array, rule: Rule) -> int | None:
    """The first task with an output [n, classes] that differs by a bit."""
    differing = old != new
    return int(rule.task_of_class[np.argwhere(differing)[0][1]]) if differing.any() else None


def _other_logits(old: Array, new: Array, rule: Rule) -> int | None:
    """The first task whose logits [n, classes] differ by more than the scale and shift that a decision gives them."""
    for task, columns in enumerate(rule.columns):
        x, y = (values[:, columns] - values[:, columns].mean() for values in (old, new))
        scale = float((x * y).sum() / max((x * x).sum(), np.finfo(np.float64).tiny))
        if np.abs(y - scale * x).max() > ROUNDING * np.abs(y).max():
            return task
    return None


def _check_known(then: Verdicts, now: Verdicts, alpha: float, where: str, kind: str, lost_allowed: bool) -> None:
    """Print how many answers to images of earlier tasks change; refuse if certainly a larger share than alpha of those
    that were known is called unknown.

    The scores of a new task count for all tasks, so that thresholds move a little with every task.
    """
    found = LostKnown.of(then.known, now.known, alpha)
    gained, moved = int((now.known & ~then.known).sum()), int((then.class_id != now.class_id).sum())
    note(
        f"{where}of {found.images} {kind} images of earlier tasks, {moved} get another label, {found.lost} of "
        f"{found.known} known ones become unknown, {gained} unknown ones become known"
    )
    if found.too_many and not lost_allowed:
        raise PublishError(
            f"{where}{found.lost} of {found.known} known images would be called unknown; "
            f"allowed: a share of {alpha:g}, or --force"
        )


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
    if len(after.manifest.tasks) == len(before.manifest.tasks) and before.rule.score == after.rule.score:
        return
    found = compare_classes(after.manifest.labels, len(before.manifest.labels), class_ids, *answers)
    harmed = "".join(f"; {each}" for each in found.worse(min(max_loss, MAX_LOSS)))
    note(f"{precision}: {found.summary(kind)}{harmed}")
    if worse := found.worse(max_loss):
        raise PublishError(
            f"{precision}: earlier classes lose more than {max_loss:g} points of CIL: "
            f"{'; '.join(map(str, worse))}. Allowed: another --max-loss, or --force"
        )
