"""What a new task costs the classes that were learned before it: CIL per class, before and after, on validation images,
and how many images that were known are unknown afterwards.

Learning a task changes no output of an earlier one, but the new classes compete with the old ones for every image. A
new class of few images may take an old one's place although all old outputs are the same. The scores of a new task
count for all tasks, so that thresholds move a little with every task.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MAX_LOSS = 5.0
"""The points by which the CIL of a class may fall. One image may always be lost: a class may have few."""
SURE = 1.645
"""The quantile of the normal distribution for a one-sided 95 % interval."""


@dataclass(frozen=True)
class ClassLoss:
    """One class: how many of its images were right before, are right now, and what the others are taken for now."""

    label: str
    images: int
    before: int
    after: int
    taken_for: tuple[tuple[str, int], ...]

    def exceeds(self, most: float) -> bool:
        """Whether more than one image and more than `most` points are lost, by the lower end of a 95 % interval.

        A class of 27 images that loses three of them may lose 4 points in the long run, or 30.
        """
        lost = self.before - self.after
        return lost > 1 and 100 * _least_share(lost, self.images) > most

    def __str__(self) -> str:
        before, after = (f"{100 * right / self.images:.0f} %" for right in (self.before, self.after))
        taken = ", ".join(f"{label!r} ({count})" for label, count in self.taken_for)
        return f"{self.label!r} {before} -> {after} of {self.images} images, taken for {taken}"


@dataclass(frozen=True)
class OldClasses:
    """All classes of the earlier bundle that validation images are available of, and those without any."""

    measured: tuple[ClassLoss, ...]
    missing: tuple[str, ...]

    def worse(self, most: float) -> list[ClassLoss]:
        return [each for each in self.measured if each.exceeds(most)]

    def __str__(self) -> str:
        return self.summary()

    def summary(self, kind: str = "validation") -> str:
        """CIL before and after in one line; `kind` is what the images were to the run."""
        if not self.measured:
            return f"CIL of the earlier classes was not checked: no {kind} image of them is available (--data)"
        images = sum(each.images for each in self.measured)
        before, after = (
            100 * sum(getattr(each, name) for each in self.measured) / images for name in ("before", "after")
        )
        unchecked = f"; not checked: {', '.join(map(repr, self.missing))}" if self.missing else ""
        return f"CIL of the earlier classes on {images} {kind} images: {before:.1f} % -> {after:.1f} %{unchecked}"


@dataclass(frozen=True)
class LostKnown:
    """Of images of earlier classes, how many were known, and how many of these are called unknown now."""

    images: int
    known: int
    lost: int
    alpha: float
    """The share of known images that may be called unknown."""

    @classmethod
    def of(cls, then: NDArray[np.bool_], now: NDArray[np.bool_], alpha: float) -> "LostKnown":
        """Whether each image [n] was known, and is."""
        return cls(len(then), int(then.sum()), int((then & ~now).sum()), alpha)

    @property
    def too_many(self) -> bool:
        """Whether the share that is lost is certainly larger than alpha."""
        return self.known > 0 and lower_share(self.lost, self.known) > self.alpha


def lower_share(count: int, total: int) -> float:
    """The lower end of a share's one-sided 95 % confidence interval: Wilson's, with continuity correction."""
    if count == 0:
        return 0.0
    share, square = count / total, SURE**2
    root = math.sqrt(max(square - 2 - 1 / total + 4 * share * (total - count + 1), 0.0))
    return max((2 * count + square - 1 - SURE * root) / (2 * (total + square)), 0.0)


def _least_share(count: int, total: int) -> float:
    """The lower end of the one-sided 95 % interval of a share (Wilson's)."""
    share, square = count / total, SURE**2 / total
    middle = share + square / 2
    return float((middle - SURE * np.sqrt((share * (1 - share) + square / 4) / total)) / (1 + square))


def compare_classes(
    labels: Sequence[str],
    old: int,
    class_ids: NDArray[np.integer],
    earlier: NDArray[np.integer],
    later: NDArray[np.integer],
) -> OldClasses:
    """The answers [n] of two bundles to images of `class_ids` [n]; the first `old` of the `labels` are compared."""
    measured, missing = [], []
    for class_id, label in enumerate(labels[:old]):
        rows = class_ids == class_id
        if not rows.any():
            missing.append(label)
            continue
        wrong = Counter(labels[other] for other in later[rows] if other != class_id)
        before, after = (int((answers[rows] == class_id).sum()) for answers in (earlier, later))
        measured.append(ClassLoss(label, int(rows.sum()), before, after, tuple(wrong.most_common(3))))
    return OldClasses(tuple(measured), tuple(missing))
