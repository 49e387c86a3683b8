"""What a lesson would change, measured before it is served: on its examples, on earlier classes, on waiting unknowns.

No image of the run is at hand. Its classes are judged by stand-ins (`ClassFactor.stand_ins`), vectors with the same
mean and covariance as their images, left out of the statistics fold by fold as the examples are: an image that has
shaped the statistics would always be recognised. The gate is that of publishing (`serving/bundle/old_classes.py`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from serving.bundle.decision import Rule, judge
from serving.bundle.old_classes import MAX_LOSS, OldClasses, compare_classes
from serving.bundle.pooled import PooledSettings, Statistics
from serving.bundle.pooled.left_out import FOLDS, LeftOut, LeftOutDiscriminant, LeftOutRidge
from serving.teaching.curriculum import Curriculum, Vectors
from serving.teaching.learning import Knowledge, Progress

Ids = NDArray[np.int64]
Doubles = NDArray[np.float64]

STAND_INS = 25
"""Vectors per class of the run that stand in for its images."""
GOOD, WEAK = 0.8, 0.5
"""Shares of left-out examples that are recognised from which a class is good, or weak."""
ENOUGH = 20
"""Examples of a class that are advised."""


@dataclass(frozen=True)
class TrialVectors:
    """Vectors phi [n, length] with the column of their class, all of which are in the statistics."""

    phi: Doubles
    ids: Ids

    @classmethod
    def of(cls, knowledge: Knowledge) -> TrialVectors:
        """Stand-ins of the classes of the run, and the examples of every lesson."""
        curriculum = knowledge.curriculum
        place = {label: column for column, label in enumerate(knowledge.labels)}
        projection = curriculum.teachable.factors.projection
        phi = [factor.stand_ins(STAND_INS, seed=0) for factor in curriculum.teachable.factors.classes]
        ids = [np.full(len(rows), number) for number, rows in enumerate(phi)]
        for lesson in curriculum.lessons:
            for label, rows in lesson.vectors.items():
                phi.append(projection.expand(rows))
                ids.append(np.full(len(rows), place[label]))
        return cls(np.concatenate(phi), np.concatenate(ids).astype(np.int64))


@dataclass(frozen=True)
class ClassTrial:
    """One class whose examples changed: how many of its examples are recognised while they are left out."""

    label: str
    new: bool
    added: int
    removed: int
    images: int
    of: int
    right_before: int
    right_after: int
    known_after: int
    grade: str
    advice: str


@dataclass(frozen=True)
class Trial:
    """What was measured."""

    classes: tuple[ClassTrial, ...]
    old: OldClasses
    worse: tuple[str, ...]
    """Earlier classes that the gate objects to."""
    waiting: int
    """Unlabelled images that wait in the quarantine ..."""
    waiting_known: dict[str, int]
    """... and how many of them would be known now, by their label."""
    rejects_unknown: bool


def try_out(
    before: Knowledge,
    after: Knowledge,
    rules: tuple[Rule, Rule],
    waiting: Vectors,
    progress: Progress = lambda share: None,
) -> Trial:
    """Compare two states of knowledge. `waiting` are the vectors of unlabelled images in the quarantine."""
    evidence = TrialVectors.of(after)
    later = left_out_logits(after.statistics, after.settings, evidence)
    progress(0.5)
    right = later.argmax(axis=1) == evidence.ids
    earlier_evidence = TrialVectors.of(before)
    earlier = left_out_logits(before.statistics, before.settings, earlier_evidence)
    progress(0.9)
    old = _compare(before, after, (earlier_evidence, earlier), (evidence, later))
    known = _accepted(after, rules[1], evidence)
    classes = tuple(
        _class_trial(label, before, after, rules[0], evidence, right, known)
        for label in after.labels
        if _examples(before.curriculum, label) != _examples(after.curriculum, label)
    )
    verdicts = judge(after.model.upright().outputs(waiting), rules[1]) if len(waiting) else None
    found: Counter[str] = Counter()
    if verdicts is not None:
        found.update(after.labels[column] for column in verdicts.class_id[verdicts.known])
    return Trial(
        classes,
        old,
        tuple(each.label for each in old.worse(MAX_LOSS)),
        len(waiting),
        dict(found.most_common()),
        not rules[1].blind_tasks(),
    )


def left_out_logits(statistics: Statistics, settings: PooledSettings, evidence: TrialVectors) -> Doubles:
    """The logits [n, classes] of all evidence by statistics without the fold of each vector.

    A class that loses all its images with a fold gets the logits of all images.
    """
    dim = statistics.projection.dim
    generator = np.random.default_rng(0)
    fold = np.empty(len(evidence.ids), np.int64)
    for number, class_id in enumerate(np.unique(evidence.ids)):
        own = np.flatnonzero(evidence.ids == class_id)
        fold[own] = (generator.permutation(len(own)) + number) % FOLDS
    images = LeftOut(statistics, evidence.phi[:, :dim], evidence.ids, fold, evidence.phi)
    discriminant = LeftOutDiscriminant(images, settings.shrinkage)
    ridge = LeftOutRidge(images, settings.ridge, expanded=settings.expanded)
    logits = np.full((len(evidence.ids), len(statistics.class_ids)), -np.inf)
    for rows in images.folds():
        lda = discriminant.without(rows)
        mixed = (1 - settings.mix) * lda.outputs / discriminant.margin
        mixed = mixed + settings.mix * ridge.without(rows)[:, lda.kept] / ridge.margin
        logits[np.ix_(rows, np.flatnonzero(lda.kept))] = mixed
    return logits


def _compare(
    before: Knowledge, after: Knowledge, earlier: tuple[TrialVectors, Doubles], later: tuple[TrialVectors, Doubles]
) -> OldClasses:
    """Classes that both have, by the vectors that both have of them: the first ones of each class are the same."""
    place = {label: column for column, label in enumerate(after.labels)}
    ids: list[int] = []
    answers: tuple[list[int], list[int]] = [], []
    for column, label in enumerate(before.labels):
        if label not in place:
            continue
        rows = [np.flatnonzero(earlier[0].ids == column), np.flatnonzero(later[0].ids == place[label])]
        count = min(map(len, rows))
        was, now = (each[1][own[:count]].argmax(axis=1) for each, own in zip((earlier, later), rows, strict=True))
        ids += [place[label]] * count
        answers[0].extend(place.get(before.labels[number], -1) for number in was)
        answers[1].extend(now.tolist())
    old = [place[label] for label in before.labels if label in place]
    found = compare_classes(after.labels, len(after.labels), np.array(ids), *map(np.array, answers))
    kept = {after.labels[column] for column in old}
    return OldClasses(
        tuple(each for each in found.measured if each.label in kept),
        tuple(label for label in found.missing if label in kept),
    )


def _accepted(after: Knowledge, rule: Rule, evidence: TrialVectors) -> NDArray[np.bool_]:
    """Whether each vector would be accepted as known, by detectors that have seen it."""
    encoded = evidence.phi[:, : after.curriculum.dim].astype(np.float32)
    return np.asarray(judge(after.model.upright().outputs(encoded), rule).known)


def _class_trial(
    label: str,
    before: Knowledge,
    after: Knowledge,
    rule: Rule,
    evidence: TrialVectors,
    right: NDArray[np.bool_],
    known: NDArray[np.bool_],
) -> ClassTrial:
    had, has = _examples(before.curriculum, label), _examples(after.curriculum, label)
    column = after.labels.index(label)
    own = np.flatnonzero(evidence.ids == column)[-len(has) :] if has else np.empty(0, int)
    served = judge(before.model.upright().outputs(after.curriculum.vectors(label)), rule) if has else None
    right_before = 0
    if served is not None and label in before.labels:
        right_before = int(((served.class_id == before.labels.index(label)) & served.known).sum())
    images = int(after.statistics.counts[column])
    right_after = int(right[own].sum())
    grade, advice = _grade(right_after, len(own), images, label)
    return ClassTrial(
        label=label,
        new=label not in before.labels,
        added=len(has - had),
        removed=len(had - has),
        images=images,
        of=len(own),
        right_before=right_before,
        right_after=right_after,
        known_after=int(known[own].sum()),
        grade=grade,
        advice=advice,
    )


def _grade(right: int, of: int, images: int, label: str) -> tuple[str, str]:
    share = right / of if of else 1.0
    if share < WEAK:
        return "not working", f"{label!r} is taken for other classes: check its examples, or add some that differ"
    if images < ENOUGH:
        return "few examples", f"{images} images: {ENOUGH} or more make the answers more reliable"
    if share < GOOD:
        return "weak", "more examples would help, above all of the kind that is taken for other classes"
    return "good", ""


def _examples(curriculum: Curriculum, label: str) -> set[str]:
    return {name for lesson in curriculum.lessons for name in lesson.digests.get(label, ())}
