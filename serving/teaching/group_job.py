"""Grouping the unlabelled images of the quarantine, so that a person can name many at once."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from serving.bundle.decision import judge
from serving.bundle.model import BundleModel
from serving.bundle.pooled.grouping import NONE, cohesion, cut_for, find_groups, nearest_group, whitened
from serving.quarantine.records import FoundGroup
from serving.teaching.curriculum import Curriculum
from serving.teaching.learning import learn
from serving.teaching.lesson_job import Shows, encoded_items
from serving.teaching.trial import TrialVectors

if TYPE_CHECKING:
    from serving.quarantine.store import Store

MOST_ITEMS = 10_000
NEAR = 0.5
"""A group is near a known class if that class is the best guess for at least this share of its images."""
SHIFTED, SURE = 0.8, 0.75
"""It looks like a changed version of that class if the share is at least SHIFTED and the median confidence at least
SURE."""


def group_unknowns(store: Store, model: BundleModel, display: Shows) -> dict[str, Any]:
    """Group the unlabelled images that the model does not know, and store the groups; what was found, in numbers."""
    items = [item for item in store.items(state="new", latest=MOST_ITEMS) if item.damage is None]
    vectors = encoded_items(store, model, [item.id for item in items], display.part("reading images", 0.05, 0.4))
    ids = [item.id for item in items if item.id in vectors]
    if not ids:
        store.replace_groups([])
        return {"images": 0, "known_by_now": 0, "groups": 0, "loose": 0}
    encoded = np.stack([vectors[item_id] for item_id in ids])
    assert model.pooled is not None
    verdicts = judge(model.pooled.upright().outputs(encoded), model.bundle.rule)
    unknown = np.flatnonzero(~verdicts.known)
    curriculum = Curriculum.of(model.bundle)
    knowledge = learn(curriculum)
    known = TrialVectors.of(knowledge)
    every = np.concatenate([encoded[unknown], known.phi[:, : curriculum.dim].astype(np.float32)])
    turned = whitened(every, knowledge.statistics, knowledge.settings.shrinkage)
    unit = turned[: len(unknown)]
    cut = cut_for(turned[len(unknown) :], known.ids)
    groups = find_groups(unit, cut, progress=display.part("grouping", 0.4, 0.95))
    labels, confidence = model.manifest.labels, verdicts.probability.max(axis=1)
    found = []
    for number, tightness in enumerate(cohesion(unit, groups)):
        rows = unknown[groups == number]
        near, guesses = Counter(labels[verdicts.class_id[row]] for row in rows).most_common(1)[0]
        share = guesses / len(rows)
        shifted = share >= SHIFTED and float(np.median(confidence[rows])) >= SURE
        found.append(FoundGroup([ids[row] for row in rows], tightness, near if share >= NEAR else None, shifted))
    resembled, similarity = nearest_group(unit, groups)
    loose = {
        ids[unknown[row]]: (int(resembled[row]), float(similarity[row]))
        for row in np.flatnonzero((groups == NONE) & (resembled != NONE))
    }
    display.part("storing the groups", 0.95, 1.0)
    store.replace_groups(found, loose)
    return {
        "images": len(ids),
        "known_by_now": len(ids) - len(unknown),
        "groups": len(found),
        "loose": int((groups == NONE).sum()),
    }
