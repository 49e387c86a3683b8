"""Notices that the images of a stream are no longer like those before, per task and over all tasks.

The null hypothesis is "nothing changes": the images that are answered with a task are exchangeable. It is not
about how they compare with the images that the task was learned from, because a few hundred stored scores are too few
for that: after a hundred thousand images, every task would differ from its own stored scores significantly. It also
allows unknown images, as long as their share stays the same.

The conformal p-value of an image is its rank by unknown score, or by brightness, among all earlier images of its task,
with ties broken at random. While nothing changes, the p-values of a stream are independent and uniform, whatever the
scores are distributed like. To need constant memory, scores are counted in fixed bins; a binned score is a score too,
so nothing is approximated.

Each betting function f (of mean 1 under uniform p-values) multiplies a stake. The Shiryaev-Roberts statistic
R_t = (1 + R_{t-1}) f(p_t) is the sum of many stakes: a new stake of 1 is added before every image, and all of them are
multiplied from then on. R_t - t is a martingale, so the probability that R exceeds c within T images is at most T / c,
however often one looks, and the mean number of images before a false alarm is at least c. The evidence is the mean of R
over several betting functions. Sums over workers and tasks keep the bound, because T is the number of all their images.

Vovk, Nouretdinov, Gammerman: "Testing exchangeability on-line" (2003); Volkhonskiy et al.: "Inductive conformal
martingales for change-point detection" (2017).
"""

from __future__ import annotations

import bisect
import math
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

EVERY = 10_000_000
"""By default, false alarms are at least this many images apart on average: at most 1 % in 100,000 images."""
SCORE, BRIGHTNESS = 0, 1
"""The quantities that are tested: the unknown score of an image, and its mean pixel in 0..255. The scores of a model
that was learned with images of different brightness hardly change when a lamp fails, so brightness is tested too."""
EDGES = (
    (
        *(-math.log10(1 - step / 40) for step in range(1, 40)),
        *(1.6 + step / 10 for step in range(1, 25)),
        *(4.0 + step / 2 for step in range(1, 17)),
        *(float(2**power) for power in range(4, 12)),
    ),
    tuple(float(2 * step) for step in range(1, 128)),
)
"""Where bins of each end. Of the unknown score: even steps of the p-value first, then of its logarithm."""
CHANGES = (("less familiar", "more familiar"), ("brighter", "darker"))
"""The change to report if each quantity has risen, and if it has fallen."""
POWERS = (0.25, 0.5, 0.75)
"""Betting functions k p^(k - 1), which win if p-values are small, and the same of 1 - p."""
BETS = 2 * len(POWERS)
"""Betting functions per quantity."""
LEAST_P = 1e-12
EXAMPLES, RECENT, ALARMS = 6, 256, 8
"""Images that an alarm names, the last images that they are chosen from, and alarms that a worker remembers."""
ALL = "all"
"""The name of the test over all tasks."""


class Watched(NamedTuple):
    """The numbers of one image, in the order of EDGES."""

    unknown_score: float
    brightness: float


class OddImage(NamedTuple):
    """An image that differs most from those before the change."""

    request_id: str | None
    label: str
    unknown_score: float
    brightness: float
    at: float


class Alarm(NamedTuple):
    """A change that was noticed."""

    task: str
    """The number of a task, or "all"."""
    change: str
    """The change of the images, one of CHANGES."""
    at: float
    """When it was noticed, in seconds since 1970."""
    since: float
    """The estimated beginning of the change."""
    images: int
    """Images from then on until it was noticed."""
    before: int
    """Images that they were compared with."""
    examples: tuple[OddImage, ...]


class Reference:
    """How many earlier images were in each bin."""

    def __init__(self, edges: Sequence[float]) -> None:
        self._edges = edges
        self._counts = [0] * (len(edges) + 1)
        self.images = 0

    def p_value(self, value: float, chance: float) -> float:
        """The share of earlier images with at least this value; `chance` in 0..1 breaks ties. Counts the image."""
        place = bisect.bisect_right(self._edges, value)
        counts = self._counts
        above, same = sum(counts[place + 1 :]), counts[place]
        p_value = (above + chance * (same + 1)) / (self.images + 1)
        counts[place] = same + 1
        self.images += 1
        return p_value


def bets(p_value: float) -> list[float]:
    """The factor of the stake of each betting function: first those for small p-values, then those for large ones."""
    low, high = math.log(max(p_value, LEAST_P)), math.log(max(1 - p_value, LEAST_P))
    return [power * math.exp((power - 1) * side) for side in (low, high) for power in POWERS]


class DriftEvidence:
    """Against "nothing changes", from a stream of p-values."""

    def __init__(self) -> None:
        self.images = 0
        self._sums = [0.0] * (BETS * len(EDGES))
        # For each betting function, the stake of the best time to enter (CUSUM), and that time.
        self._best = [1.0] * len(self._sums)
        self._entered = [(0, 0.0)] * len(self._sums)

    @property
    def value(self) -> float:
        """R, the mean over the betting functions."""
        return sum(self._sums) / len(self._sums)

    def add(self, factors: Sequence[float], now: float) -> None:
        """The next image, by what its p-values multiply the stakes by."""
        sums, best, entered = self._sums, self._best, self._entered
        for place, factor in enumerate(factors):
            sums[place] = (1.0 + sums[place]) * factor
            stake = best[place]
            if stake <= 1.0:
                stake, entered[place] = 1.0, (self.images, now)
            best[place] = stake * factor
        self.images += 1

    def change(self) -> tuple[int, float, int, bool]:
        """The image and the time of the change, by the betting function that won most; what has changed, and whether
        it has risen."""
        winner = max(range(len(self._sums)), key=self._sums.__getitem__)
        return (*self._entered[winner], winner // BETS, winner % BETS < len(POWERS))


class DriftMonitor:
    """The tests of one worker for one model, in constant memory."""

    def __init__(
        self,
        tasks: int,
        every: int = EVERY,
        *,
        chance: Callable[[], float] = random.random,
        clock: Callable[[], float] = time.time,
    ) -> None:
        # Two tests see every image: its task's, and that over all tasks.
        self.threshold = 2.0 * every
        self.alarms: deque[Alarm] = deque(maxlen=ALARMS)
        self._chance, self._clock = chance, clock
        self._references = [_references() for _ in range(tasks)]
        self._tests = {**{str(task): DriftEvidence() for task in range(tasks)}, ALL: DriftEvidence()}
        self._recent: deque[tuple[str, list[float], OddImage]] = deque(maxlen=RECENT)

    @property
    def images(self) -> dict[str, int]:
        """Images by test since its last alarm."""
        return {name: test.images for name, test in self._tests.items()}

    def evidence(self, name: str) -> float:
        """The evidence of one test, as a share of what an alarm needs."""
        return self._tests[name].value / self.threshold

    def add(self, task: int, watched: Watched, label: str, request_id: str | None = None) -> Alarm | None:
        """Take note of an answer; returns the change that is noticed with it, if any."""
        now, name = self._clock(), str(task)
        references = self._references[task]
        p_values = [each.p_value(value, self._chance()) for each, value in zip(references, watched, strict=True)]
        self._recent.append((name, p_values, OddImage(request_id, label, *watched, now)))
        factors = [factor for p_value in p_values for factor in bets(p_value)]
        raised = None
        # The task last: one change raises one alarm, and an alarm of a task is more specific than one of all tasks.
        for each in (ALL, name):
            test = self._tests[each]
            test.add(factors, now)
            raised = each if test.value >= self.threshold else raised
        return None if raised is None else self._alarm(raised, now)

    def _alarm(self, name: str, now: float) -> Alarm:
        test = self._tests[name]
        before, since, what, risen = test.change()
        recent = [one for one in self._recent if one[2].at >= since and name in (ALL, one[0])]
        recent.sort(key=lambda one: one[1][what], reverse=not risen)
        examples = tuple(example for _, _, example in recent[:EXAMPLES])
        change = CHANGES[what][0 if risen else 1]
        alarm = Alarm(name, change, now, since, test.images - before, before, examples)
        self.alarms.append(alarm)
        # From here on, later images are compared with those after the change.
        for task in range(len(self._references)) if name == ALL else (int(name),):
            self._references[task] = _references()
            self._tests[str(task)] = DriftEvidence()
        self._tests[ALL] = DriftEvidence()
        return alarm


def _references() -> list[Reference]:
    return [Reference(edges) for edges in EDGES]


def wilson(count: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """The 95 % confidence interval of a share, by Wilson's formula; (0, 1) without images."""
    if not total:
        return 0.0, 1.0
    share, square = count / total, z * z / total
    center = (share + square / 2) / (1 + square)
    spread = z * math.sqrt(share * (1 - share) / total + square / (4 * total)) / (1 + square)
    return max(0.0, center - spread), min(1.0, center + spread)
