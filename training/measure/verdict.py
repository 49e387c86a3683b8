"""Is a run good? Each part of its answers is good, weak, or does not work, on test images.

**Right answers (WP and TP).** Accuracy alone is no verdict: 50 % is guessing with two tasks and remarkable with twenty.
So accuracy is put on a scale on which guessing is 0 and perfection 1: skill = (accuracy - guess) / (1 - guess). The
guess is the best that is possible without looking at the image: always the most frequent task (TP), or the most
frequent class of the given task (WP). Few test images prove little, so the lower end of a one-sided 95 % confidence
interval (Wilson's, with continuity correction) counts too:

- not working: guessing is not excluded (the lower end is at most the guess), or the skill is below 0.2: four of five
  mistakes that guessing makes are still made;
- good: the skill is at least 0.8 (one mistake in ten between two classes), and at least 0.5 at the lower end;
- weak: anything between;
- not measured: nothing is to be decided (one task, or one class per task), or there are so few test images that even
  answers without a mistake would not exclude guessing (four or fewer, between two).

**Known or unknown.** AUROC compares the scores of known and unknown images, and guessing has 0.5; its standard error
is Hanley and McNeil's (1982). A good AUROC does not help if the threshold is wrong, so the shares rejected at the
run's alpha count as well:

- not working: guessing is not excluded (the lower end is at most 0.5), AUROC is below 0.6, or unknown images are not
  rejected more often than known ones, as in a run with too few images to reject any;
- good: AUROC is at least 0.9, and at least 0.8 at the lower end; at least half of the unknown images are rejected;
  and no more than three times alpha of the known ones;
- weak: anything between.

Without images of classes that no task has, every task's images are unknown to the run without that task. Learning a
task changes no output of the others, so that run is had by leaving out the task's columns. Statistics that are pooled
over all tasks have been shaped by the images of every task. Of these, the run as it was before a task was learned is
measured on the images of that task. If it had too few images to reject any before the last task, columns are left out
there, too, which makes unknown images look easier than they are.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

from serving.bundle.decision import Outputs, Rule, Verdicts, judge
from serving.bundle.old_classes import lower_share
from serving.bundle.run_verdict import Grade, PartVerdict, RunVerdict, summarise
from training.measure.metrics import first_tasks, right_within_task, task_of

CONFIDENCE = 1.645
"""Standard deviations below an estimate at which a one-sided 95 % confidence interval ends."""
LEAST_SKILL, GOOD_SKILL, SURE_SKILL = 0.2, 0.8, 0.5
LEAST_AUROC, GOOD_AUROC, SURE_AUROC = 0.6, 0.9, 0.8
GOOD_REJECTED, MOST_ALPHAS = 0.5, 3.0

FEW_PHOTOS = 20
"""With so few photos per class or fewer, the verdict on a run with a trunk has a note on what to expect."""

OutputsAfter = Callable[[int], Outputs]
"""How many of the tasks -> the outputs for the known images after these were learned."""

NEVER_LEARNED = "classes never learned"
LEFT_OUT = "the images of each task, left out in turn"
LATER = "the images of each task, before it was learned"


class Remedies(NamedTuple):
    """What helps a run whose parts are not good."""

    of_classes: str
    of_features: str
    of_scores: str


FROM_SCRATCH = Remedies(
    "Longer training and more images per class",
    "longer training, more images per class, or a larger network",
    " `openworld compare` shows other scores.",
)
WITH_TRUNK = Remedies(
    "More photos per class, another --trunk and a larger --size",
    "more photos per class, another --trunk, or a larger --size",
    "",
)
"""The network is given, and what is learned on its vectors is computed to the end."""


@dataclass(frozen=True)
class Hits:
    """How many of some answers are right, and the share that would be right without looking at the images."""

    right: int
    images: int
    guess: float

    @property
    def share(self) -> float:
        return self.right / self.images

    @property
    def skill(self) -> float:
        return self._skill(self.share)

    @property
    def lower(self) -> float:
        """The lower end of the confidence interval of the share."""
        return lower_share(self.right, self.images)

    @property
    def grade(self) -> Grade:
        if self.guess >= 1 or lower_share(self.images, self.images) <= self.guess:
            return "not measured"
        if self.lower <= self.guess or self.skill < LEAST_SKILL:
            return "not working"
        return "good" if self.skill >= GOOD_SKILL and self._skill(self.lower) >= SURE_SKILL else "weak"

    def _skill(self, share: float) -> float:
        return (share - self.guess) / (1 - self.guess)


@dataclass(frozen=True)
class Separation:
    """Known against unknown images: AUROC, how many there are, and the shares of both that are rejected."""

    auroc: float
    known: int
    unknown: int
    rejected_known: float
    rejected_unknown: float
    source: str = NEVER_LEARNED
    """Where the unknown images come from."""

    @property
    def lower(self) -> float:
        """The lower end of the confidence interval of AUROC."""
        return self.auroc - CONFIDENCE * auroc_error(self.auroc, self.known, self.unknown)

    def grade(self, alpha: float) -> Grade:
        if min(self.lower - 0.5, self.rejected_unknown - self.rejected_known) <= 0 or self.auroc < LEAST_AUROC:
            return "not working"
        separated = self.auroc >= GOOD_AUROC and self.lower >= SURE_AUROC
        decided = self.rejected_unknown >= GOOD_REJECTED and self.rejected_known <= MOST_ALPHAS * alpha
        return "good" if separated and decided else "weak"


def auroc_error(auroc: float, known: int, unknown: int) -> float:
    """The standard error of an AUROC by Hanley and McNeil. A perfect AUROC counts as one with half a mistake: with few
    images it is not certain either."""
    least = 1 / (2 * min(known, unknown))
    area = min(max(auroc, least), 1 - least)
    one, other = area / (2 - area) - area**2, 2 * area**2 / (1 + area) - area**2
    return math.sqrt((area * (1 - area) + (unknown - 1) * one + (known - 1) * other) / (known * unknown))


def class_hits(verdicts: Verdicts, rule: Rule, class_ids: NDArray[np.integer]) -> Hits:
    """WP: the right class if the task is given, on test images of `class_ids`. Tasks of one class have nothing to
    decide and are left out."""
    several = np.array([task.classes > 1 for task in rule.tasks])[task_of(class_ids, rule)]
    right = int(right_within_task(verdicts, rule, class_ids)[several].sum())
    images = int(several.sum())
    counts = np.bincount(class_ids[several], minlength=len(rule.task_of_class))
    guessed = sum(int(counts[columns].max()) for columns in rule.columns)
    return Hits(right, images, guessed / images) if images else Hits(0, 1, 1.0)


def task_hits(verdicts: Verdicts, rule: Rule, class_ids: NDArray[np.integer]) -> Hits:
    """TP: the right task."""
    true = task_of(class_ids, rule)
    most = int(np.bincount(true).max())
    return Hits(int((verdicts.task == true).sum()), len(true), most / len(true))


def never_learned(on_known: Verdicts, on_unknown: Verdicts) -> Separation:
    """Test images of learned classes against images of classes that no task has."""
    scores = np.concatenate([on_known.unknown_score, on_unknown.unknown_score])
    unknown = np.repeat([0, 1], [len(on_known.known), len(on_unknown.known)])
    return Separation(
        auroc=float(roc_auc_score(unknown, scores)),
        known=len(on_known.known),
        unknown=len(on_unknown.known),
        rejected_known=float(1 - on_known.known.mean()),
        rejected_unknown=float(1 - on_unknown.known.mean()),
    )


def left_out(outputs: Outputs, rule: Rule, class_ids: NDArray[np.integer]) -> Separation | None:
    """Every task's images against the others', by the run without that task: AUROC and shares are means over tasks.

    None with test images of fewer than two tasks.
    """
    true = task_of(class_ids, rule)
    tested = np.unique(true)
    if len(tested) < 2:
        return None
    found = []
    for task in tested.tolist():
        rest = rule.of([other for other in range(len(rule.tasks)) if other != task])
        columns = rule.task_of_class != task
        verdicts = judge({name: values[:, columns] for name, values in outputs.items()}, rest)
        known, unknown = (Verdicts(*(values[rows] for values in verdicts)) for rows in (true != task, true == task))
        found.append(never_learned(known, unknown))
    return replace(_mean(found, LEFT_OUT), known=len(true))


def not_yet_learned(rule: Rule, class_ids: NDArray[np.integer], outputs_after: OutputsAfter) -> Separation | None:
    """The next task's images against those of the tasks before it, by the run before it was learned: means over tasks.

    None without test images of two tasks, one of them later than the first task. Runs that have too few images to
    reject any are left out: the whole run may have enough.
    """
    true, found = task_of(class_ids, rule), []
    for count in range(1, len(rule.tasks)):
        known, unknown = true < count, true == count
        if not (known.any() and unknown.any()):
            continue
        outputs, rule_then = first_tasks(outputs_after(count), rule, count)
        if rule_then.blind_tasks():
            continue
        on_known, on_unknown = (
            judge({name: values[rows] for name, values in outputs.items()}, rule_then) for rows in (known, unknown)
        )
        found.append(never_learned(on_known, on_unknown))
    return _mean(found, LATER) if found else None


def _mean(found: Sequence[Separation], source: str) -> Separation:
    """Means over tasks; how certain they are is judged by the fewest images."""
    return Separation(
        auroc=float(np.mean([each.auroc for each in found])),
        known=min(each.known for each in found),
        unknown=min(each.unknown for each in found),
        rejected_known=float(np.mean([each.rejected_known for each in found])),
        rejected_unknown=float(np.mean([each.rejected_unknown for each in found])),
        source=source,
    )


def judge_run(
    within: Hits, between: Hits, unknown: Separation | None, rule: Rule, photos_per_class: int | None = None
) -> RunVerdict:
    """The verdict on a run: WP, TP, and the separation of known and unknown images if there are any.

    `photos_per_class` of a run with a trunk is how many photos half of its classes were learned from at most.
    """
    remedies = FROM_SCRATCH if photos_per_class is None else WITH_TRUNK
    return summarise(
        _within(within, remedies),
        _between(between, len(rule.tasks), remedies),
        _unknown(unknown, rule, remedies),
        _of_few(photos_per_class),
    )


def _of_few(photos: int | None) -> str:
    """What to expect of few photos per class."""
    if photos is None or photos > FEW_PHOTOS:
        return ""
    return (
        f"Half of the classes were learned from {photos} {'photo' if photos == 1 else 'photos'} or fewer: with 5 to "
        f"{FEW_PHOTOS} per class, expect labels that are right some points less often than with 30 or more, and about "
        "half of unknown photos to pass as known; more photos of each class help both."
    )


def _within(hits: Hits, remedies: Remedies) -> PartVerdict:
    if hits.guess >= 1:
        return PartVerdict(grade="not measured", numbers="every task has one class")
    advice = f"{remedies.of_classes} improve WP."
    return PartVerdict(grade=hits.grade, numbers=_numbers("WP", hits), advice=_unless_good(hits.grade, advice))


def _between(hits: Hits, tasks: int, remedies: Remedies) -> PartVerdict:
    if tasks == 1:
        return PartVerdict(grade="not measured", numbers="there is one task")
    if hits.guess >= 1:
        return PartVerdict(grade="not measured", numbers="test images of one task only")
    advice = f"TP improves with better features: {remedies.of_features}.{remedies.of_scores}"
    return PartVerdict(grade=hits.grade, numbers=_numbers("TP", hits), advice=_unless_good(hits.grade, advice))


def _unknown(found: Separation | None, rule: Rule, remedies: Remedies) -> PartVerdict:
    if found is None:
        return PartVerdict(
            grade="not measured",
            numbers="no unknown images, and one task only",
            advice="`openworld evaluate --unknown` measures it on images of your choice.",
        )
    grade = found.grade(rule.alpha)
    numbers = (
        f"AUROC {found.auroc:.3f}, guessing 0.5; {_percent(found.rejected_unknown)} of unknown images rejected and "
        f"{_percent(found.rejected_known)} of known ones; unknown are {found.source}"
    )
    return PartVerdict(grade=grade, numbers=numbers, advice=_unless_good(grade, _advice(found, rule, remedies)))


def _advice(found: Separation, rule: Rule, remedies: Remedies) -> str:
    if blind := rule.blind_tasks():
        numbers = ", ".join(map(str, blind))
        few = f"task {numbers} has" if rule.overall is None else "all tasks together have"
        least = math.ceil(1 / rule.alpha)
        return f"Nothing is called unknown while {few} fewer than {least} images: add images, or raise alpha."
    if found.auroc >= GOOD_AUROC and found.rejected_unknown < GOOD_REJECTED:
        return "The scores separate well but the threshold is too high: more images per class, or a larger alpha, help."
    if found.auroc >= GOOD_AUROC and found.rejected_known > MOST_ALPHAS * rule.alpha:
        return "Known images are rejected too often: test images seem to differ from those learned from."
    return f"Unknown detection improves with better features: {remedies.of_features}."


def _numbers(name: str, hits: Hits) -> str:
    few = "; too few images to exclude guessing" if hits.grade == "not measured" else ""
    return f"{name} {_percent(hits.share)} of {hits.images} test images, guessing {_percent(hits.guess)}{few}"


def _unless_good(grade: Grade, advice: str) -> str:
    return advice if grade in ("weak", "not working") else ""


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
