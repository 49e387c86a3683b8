"""What must not change, and what may change by how much, when a bundle with pooled statistics learns another task."""

from __future__ import annotations

import numpy as np

from export.graph.evidence import Evidence
from export.graph.notes import note
from serving.bundle.decision import judge
from serving.bundle.layout import TRUNK
from serving.bundle.manifest import Bundle
from serving.bundle.pooled import PooledClassifier

ALLOWED_LOST = 0.02
"""The share of photos of earlier tasks that may be called unknown from now on, though they were known before."""


def what_pooled_forgot(before: Bundle, after: Bundle, evidence: Evidence) -> str | None:
    """What a bundle would break that adds tasks to another one; None if it remembers.

    The trunk must be the same byte for byte. The classifier is made of sums over all tasks, so it changes with every
    task by design: compared are the answers of both for the photos of earlier tasks that are at hand.
    """
    old, new = before.manifest, after.manifest
    if old.trunk != new.trunk or old.files.get(TRUNK) != new.files.get(TRUNK):
        return f"{TRUNK} differs from version {old.version}"
    earlier = evidence.tasks < len(old.tasks)
    if evidence.encoded is None or not earlier.any():
        note("no photo of an earlier task is at hand: whether they are still known was not compared")
        return None
    vectors = evidence.encoded[earlier]
    then, now = (
        judge(PooledClassifier.from_arrays(bundle.pooled()).outputs(vectors), bundle.rule) for bundle in (before, after)
    )
    lost, images = int((then.known & ~now.known).sum()), len(vectors)
    moved = int((then.class_id != now.class_id).sum())
    note(
        f"pooled statistics change with every task: of {images} photos of earlier tasks, {int(then.known.sum())} were "
        f"known and {int(now.known.sum())} are, {moved} get another label"
    )
    allowed = max(1, int(np.floor(ALLOWED_LOST * images)))
    if lost > allowed:
        return f"{lost} of {int(then.known.sum())} known photos would be called unknown; allowed: {allowed}"
    return None
