"""Measures what a lesson would change before it is served: for its examples, earlier classes and unlabelled images.

No image of the run is available. Its classes are judged by stand-ins (`ClassFactor.stand_ins`), vectors with the same
mean and covariance as their images. Examples and stand-ins are left out of the statistics one by one, before the lesson
and after it: an image that is part of the statistics would always be recognised. The same vectors are judged as known
or unknown before and after. The gate is that of publishing (`serving/bundle/old_classes.py`): no class loses too many
of its images to other classes, and no larger share than alpha of what was known becomes unknown.

Adapters are not part of the comparison, because they have no closed form from which a single image can be left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from serving.bundle.decision import Rule, Verdicts, judge
from serving.bundle.old_classes import MAX_LOSS, LostKnown, OldClasses, compare_classes
from serving.bundle.pooled import PooledSettings, Statistics
from serving.bundle.pooled.left_out import LeftOut, LeftOutDiscriminant, LeftOutRidge
from serving.bundle.run_verdict import TaughtGrade, TaughtVerdict
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
    names: tuple[str, ...]
    """The digest of each example; empty for a stand-in."""

    @classmethod
    def of(cls, knowledge: Knowledge, stand_ins: int = STAND_INS) -> TrialVectors:
        """Stand-ins of the classes of the run, and the examples of every lesson."""
        curriculum = knowledge.curriculum
        place = {label: column for column, label in enumerate(knowledge.labels)}
        projection = curriculum.teachable.factors.projection
        phi = [factor.stand_ins(stand_ins, seed=0) for factor in curriculum.teachable.factors.classes]
        ids = [np.full(len(rows), number) for number, rows in enumerate(phi)]
        names = [""] * sum(map(len, phi))
        for lesson in curriculum.lessons:
            for label, rows in lesson.vectors.items():
                phi.append(projection.expand(rows))
                ids.append(np.full(len(rows), place[label]))
                names += lesson.digests[label]
        return cls(np.concatenate(phi), np.concatenate(ids).astype(np.int64), tuple(names))


@dataclass(frozen=True)
class LeftOutAnswers:
    """The class [n] that each of some vectors is taken for while it is left out."""

    knowledge: Knowledge
    evidence: TrialVectors
    columns: Ids
    names: tuple[str, ...]
    """The label of each column; a class that is merged into another one has the other's label."""

    @classmethod
    def of(
        cls, knowledge: Knowledge, merged: Mapping[str, str] | None = None, stand_ins: int = STAND_INS
    ) -> LeftOutAnswers:
        evidence, names = TrialVectors.of(knowledge, stand_ins), merged or {}
        logits = left_out_logits(knowledge.statistics, knowledge.settings, evidence)
        labels = tuple(names.get(label, label) for label in knowledge.labels)
        return cls(knowledge, evidence, logits.argmax(axis=1), labels)

    def labels(self, examples: Mapping[str, NDArray[np.float32]]) -> dict[str, str]:
        """The answer for each of some examples, by digest. One that was never taught is left out anyway."""
        names = self.names
        taught = {name: names[column] for name, column in zip(self.evidence.names, self.columns, strict=True) if name}
        fresh = [name for name in examples if name not in taught]
        if fresh:
            columns = self.knowledge.classifier.logits(np.stack([examples[name] for name in fresh])).argmax(axis=1)
            taught |= {name: names[column] for name, column in zip(fresh, columns, strict=True)}
        return {name: taught[name] for name in examples}


@dataclass(frozen=True)
class ClassTrial:
    """One class whose examples changed: how many of its examples are recognised while they are left out, by what is
    served and by what was learned. The measure is the same, so that the difference is what the lesson has changed."""

    label: str
    new: bool
    added: int
    removed: int
    images: int
    of: int
    right_before: int
    right_after: int
    known_after: int
    grade: TaughtGrade
    advice: str


@dataclass(frozen=True)
class Trial:
    """What was measured."""

    classes: tuple[ClassTrial, ...]
    old: OldClasses
    worse: tuple[str, ...]
    """Earlier classes that the gate objects to."""
    lost_known: LostKnown
    """Of stand-ins and examples of earlier classes; the gate objects to too many lost ones."""
    taught: tuple[TaughtVerdict, ...]
    """Of all classes with examples, whether they changed or not."""
    waiting: int
    """Unlabelled images in the quarantine that are unknown to what is served ..."""
    waiting_known: dict[str, int]
    """... and how many of them would be known now, by their label."""
    rejects_unknown: bool

    @property
    def gate(self) -> bool:
        """Whether the candidate may be published without a person's decision."""
        return not (self.worse or self.lost_known.too_many)


def try_out(
    before: Knowledge,
    after: Knowledge,
    rules: tuple[Rule, Rule],
    waiting: Vectors,
    progress: Progress = lambda share: None,
    merged: Mapping[str, str] | None = None,
) -> Trial:
    """Compare two states of knowledge. `waiting` are the vectors of unlabelled images in the quarantine; `merged` are
    classes of the first that are part of another class in the second."""
    later = LeftOutAnswers.of(after)
    progress(0.5)
    earlier = LeftOutAnswers.of(before, merged)
    progress(0.9)
    old = _compare(earlier, later)
    classes = tuple(
        _class_trial(label, earlier, later, rules[1])
        for label in after.labels
        if _examples(before.curriculum, label).keys() != _examples(after.curriculum, label).keys()
    )
    unknown = waiting[~_judged(before, waiting, rules[0]).known] if len(waiting) else waiting
    found: Counter[str] = Counter()
    if len(unknown):
        verdicts = _judged(after, unknown, rules[1])
        found.update(after.labels[column] for column in verdicts.class_id[verdicts.known])
    return Trial(
        classes,
        old,
        tuple(each.label for each in old.worse(MAX_LOSS)),
        _lost_known(earlier, after, rules),
        _verdicts(later),
        len(unknown),
        dict(found.most_common()),
        not rules[1].blind_tasks(),
    )


def taught_verdicts(knowledge: Knowledge) -> tuple[TaughtVerdict, ...]:
    """How far each class with examples can be relied on."""
    if not knowledge.curriculum.lessons:
        return ()
    return _verdicts(LeftOutAnswers.of(knowledge, stand_ins=0))


def _verdicts(answers: LeftOutAnswers) -> tuple[TaughtVerdict, ...]:
    """Also of classes that no example was added to: a class that is like a new one may have become weak."""
    counts, names = answers.knowledge.statistics.counts, answers.knowledge.labels
    found = []
    for label, examples in _all_examples(answers.knowledge.curriculum).items():
        right = sum(answer == label for answer in answers.labels(examples).values())
        images = int(counts[names.index(label)])
        grade, advice = _grade(right, len(examples), images, label)
        found.append(
            TaughtVerdict(label=label, grade=grade, images=images, examples=len(examples), right=right, advice=advice)
        )
    return tuple(found)


def left_out_logits(statistics: Statistics, settings: PooledSettings, evidence: TrialVectors) -> Doubles:
    """The logits [n, classes] of all evidence, each by statistics without this vector.

    An image that is alone in its class cannot be recognised without itself.
    """
    dim = statistics.projection.dim
    images = LeftOut(statistics, evidence.phi[:, :dim], evidence.ids, np.arange(len(evidence.ids)), evidence.phi)
    discriminant = LeftOutDiscriminant(images, settings.shrinkage, alone=True)
    ridge = LeftOutRidge(images, settings.ridge, expanded=settings.expanded)
    lda, linear = discriminant.each_without_itself(), ridge.each_without_itself()
    logits: Doubles = (1 - settings.mix) * lda / discriminant.margin + settings.mix * linear / ridge.margin
    return logits


def _compare(earlier: LeftOutAnswers, later: LeftOutAnswers) -> OldClasses:
    """Classes that both have, by the vectors that both have of them: the first ones of each class are the same."""
    before, after = earlier.knowledge, later.knowledge
    place = {label: column for column, label in enumerate(after.labels)}
    ids: list[int] = []
    answers: tuple[list[int], list[int]] = [], []
    for column, label in enumerate(before.labels):
        if label not in place:
            continue
        rows = [np.flatnonzero(earlier.evidence.ids == column), np.flatnonzero(later.evidence.ids == place[label])]
        count = min(map(len, rows))
        was, now = (each.columns[own[:count]] for each, own in zip((earlier, later), rows, strict=True))
        ids += [place[label]] * count
        answers[0].extend(place.get(earlier.names[number], -1) for number in was)
        answers[1].extend(now.tolist())
    old = [place[label] for label in before.labels if label in place]
    found = compare_classes(after.labels, len(after.labels), np.array(ids), *map(np.array, answers))
    kept = {after.labels[column] for column in old}
    return OldClasses(
        tuple(each for each in found.measured if each.label in kept),
        tuple(label for label in found.missing if label in kept),
    )


def _lost_known(earlier: LeftOutAnswers, after: Knowledge, rules: tuple[Rule, Rule]) -> LostKnown:
    """The images of classes in both models that become unknown, by detectors that were fitted to these images.

    Examples that the lesson removes are not counted, because they are not supposed to stay known.
    """
    evidence, kept = earlier.evidence, set(after.curriculum.examples())
    rows = [
        row
        for row, (column, name) in enumerate(zip(evidence.ids, evidence.names, strict=True))
        if earlier.names[column] in after.labels and (not name or name in kept)
    ]
    if not rows:
        return LostKnown(0, 0, 0, rules[1].alpha)
    phi = evidence.phi[rows]
    then, now = (
        judge(knowledge.model.expanded_outputs(phi), rule).known
        for knowledge, rule in zip((earlier.knowledge, after), rules, strict=True)
    )
    return LostKnown.of(then, now, rules[1].alpha)


def _class_trial(label: str, earlier: LeftOutAnswers, later: LeftOutAnswers, rule: Rule) -> ClassTrial:
    before, after = earlier.knowledge, later.knowledge
    had, has = _examples(before.curriculum, label), _examples(after.curriculum, label)
    right_before, right_after = (
        sum(answer == label for answer in answers.labels(has).values()) for answers in (earlier, later)
    )
    known = 0
    if has:
        # By detectors that have seen the examples.
        known = int(_judged(after, np.stack(list(has.values())), rule).known.sum())
    images = int(after.statistics.counts[after.labels.index(label)])
    grade, advice = _grade(right_after, len(has), images, label)
    return ClassTrial(
        label=label,
        new=label not in before.labels,
        added=len(has.keys() - had.keys()),
        removed=len(had.keys() - has.keys()),
        images=images,
        of=len(has),
        right_before=right_before,
        right_after=right_after,
        known_after=known,
        grade=grade,
        advice=advice,
    )


def _judged(knowledge: Knowledge, vectors: Vectors, rule: Rule) -> Verdicts:
    return judge(knowledge.model.upright().outputs(vectors), rule)


def _grade(right: int, of: int, images: int, label: str) -> tuple[TaughtGrade, str]:
    share = right / of if of else 1.0
    if share < WEAK:
        return "not working", f"{label!r} is taken for other classes: check its examples, or add some that differ"
    if images < ENOUGH:
        return "few examples", f"{images} images: {ENOUGH} or more make the answers more reliable"
    if share < GOOD:
        return "weak", "more examples would help, above all of the kind that is taken for other classes"
    return "good", ""


def _examples(curriculum: Curriculum, label: str) -> dict[str, NDArray[np.float32]]:
    """The vector of each example of a class, by digest."""
    return _all_examples(curriculum).get(label, {})


def _all_examples(curriculum: Curriculum) -> dict[str, dict[str, NDArray[np.float32]]]:
    """The vector of each example by digest, of every class that has some, in the order in which they were taught."""
    found: dict[str, dict[str, NDArray[np.float32]]] = {}
    for lesson in curriculum.lessons:
        for label, names in lesson.digests.items():
            found.setdefault(label, {}).update(zip(names, lesson.vectors[label], strict=True))
    return found
