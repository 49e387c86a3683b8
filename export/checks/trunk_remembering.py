"""Checks a bundle with pooled statistics after another task: what must stay the same, and how much may change."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from export.graph.evidence import Evidence
from export.graph.notes import note
from serving.bundle.decision import judge
from serving.bundle.layout import trunk_name
from serving.bundle.manifest import Bundle
from serving.bundle.model import load_pooled
from serving.bundle.old_classes import LostKnown

Answers = NDArray[np.integer]
NOTHING: Answers = np.empty((2, 0), int)


def compare_pooled(
    before: Bundle, after: Bundle, evidence: Evidence, lost_allowed: bool = False
) -> tuple[str | None, Answers]:
    """Why a bundle that adds tasks to another one must be refused, or None; and the class ids [2, n] that both answer
    for the photos of earlier tasks.

    The trunk and the detectors of earlier tasks must be the same byte for byte. The rank of a photo is among known
    photos of all tasks, which a task adds to, so single photos may pass the threshold; but certainly no larger share of
    them than alpha may be called unknown that was known before, unless that is allowed. The classifier is made of sums
    over all tasks and changes with every task by design: how many photos of earlier tasks get another label is counted
    and printed, and the caller judges how many an earlier class may lose.
    """
    old, new = before.manifest, after.manifest
    trunks = [trunk_name(precision) for precision in old.precisions]
    for name in (*trunks, *(part for task in old.tasks for part in task.parts)):
        if old.files.get(name) != new.files.get(name):
            return f"{name} differs from version {old.version}", NOTHING
    earlier = evidence.tasks < len(old.tasks)
    if evidence.encoded is None or not earlier.any():
        note("no photo of an earlier task is available: whether they are still known was not compared")
        return None, NOTHING
    vectors = evidence.encoded[earlier]
    then, now = (judge(load_pooled(bundle).outputs(vectors), bundle.rule) for bundle in (before, after))
    lost = LostKnown.of(then.known, now.known, after.rule.alpha)
    moved = int((then.class_id != now.class_id).sum())
    note(
        f"pooled statistics change with every task: of {lost.images} photos of earlier tasks, {lost.known} were "
        f"known and {int(now.known.sum())} are, {moved} get another label"
    )
    if lost.too_many and not lost_allowed:
        return (
            f"{lost.lost} of {lost.known} known photos would be called unknown; allowed: a share of {lost.alpha:g}, "
            "or --force",
            NOTHING,
        )
    return None, np.stack([then.class_id, now.class_id])
