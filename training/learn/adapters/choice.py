"""Decides whether adapters improve accuracy enough to be used, and chooses their weight and number of rotations.

All of it is measured on validation photos that neither an adapter nor the statistics that it is combined with have
seen. The measurements of each photo are stored, so that a run chooses on the photos of all its tasks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from serving.bundle.pooled.adapters import sharpened
from training.learn.temperature import temperature_scale

Array = NDArray[np.floating[Any]]
Classes = NDArray[np.int64]

WEIGHTS = tuple(round(0.1 * tenths, 1) for tenths in range(1, 11))
"""Shares of the adapters within a task that are tried."""
SHARPNESSES = (1.0, 0.5, 0.7, 0.85, 1.2, 1.4, 2.0, 3.0)
"""Statistics alone are tried with these exponents within a task: an adapter that only makes them more or less certain
does not count as an improvement."""
WORTH_ADAPTERS, WORTH_ROTATIONS = 1.0, 2.0
"""By how many standard errors the mean cross-entropy within tasks must fall for adapters to be used, and for all
rotations to be read."""
LEAST_GAIN = 0.005
"""The share of validation photos that reading all rotations must put right: it takes four times as long."""
FOLDS = 5


class Outcome(NamedTuple):
    """Shares of the validation photos of all tasks, and the mean cross-entropy within their tasks."""

    wp: float
    tp: float
    cil: float
    nats: float


@dataclass(frozen=True)
class JudgedAdapters:
    """What was measured on the validation photos of one task: one row per photo, one column per candidate."""

    nats: Array
    """Cross-entropy within the task [m, candidates]."""
    wp: NDArray[np.bool_]
    """Right within its task."""
    tp: NDArray[np.bool_]
    cil: NDArray[np.bool_]
    scales: Array
    """The factors that calibrate the task's logits, for the upright photo and for all rotations [2]."""

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        bits = {name: getattr(self, name).astype(np.uint8) for name in ("wp", "tp", "cil")}
        return {"nats": self.nats.astype(np.float32), "scales": self.scales, **bits}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> JudgedAdapters:
        """Raises a KeyError or a ValueError if it is not complete."""
        if arrays["nats"].ndim != 2 or any(arrays[name].shape != arrays["nats"].shape for name in ("wp", "tp", "cil")):
            raise ValueError("what was measured of an adapter has other shapes")
        wp, tp, cil = (arrays[name].astype(bool) for name in ("wp", "tp", "cil"))
        return cls(arrays["nats"], wp, tp, cil, arrays["scales"])


class Candidate(NamedTuple):
    """A way to answer: the weight of the adapters, and the rotations that they read. Weight 0: statistics alone."""

    weight: float
    rotations: int = 1
    sharpness: float = 1.0
    """Exponent of the statistics within a task, which only statistics alone have."""


def candidates(rotations: int) -> tuple[Candidate, ...]:
    """Every column of `Judged`; the first is what statistics answer alone."""
    alone = [Candidate(0.0, 1, sharpness) for sharpness in SHARPNESSES]
    read = dict.fromkeys((1, rotations))
    return *alone, *(Candidate(weight, count) for count in read for weight in WEIGHTS)


@dataclass(frozen=True)
class Choice:
    """What a run decides by, and why."""

    weight: float
    """0: adapters are not used."""
    rotations: int
    best: Candidate
    """The best candidate with adapters, which answers if the decision with adapters is asked for."""
    images: int
    alone: Outcome
    with_adapters: Outcome
    """The outcome of `best`."""


def judge(
    pooled: Array, columns: Sequence[slice], adapted: Mapping[int, Sequence[Array]], classes: Classes
) -> JudgedAdapters:
    """Judge the newest task's adapter on its validation photos.

    `pooled` [m, classes of all tasks] are logits of statistics that have not seen these photos, `adapted` the logits of
    every task's adapter by the number of rotations that it reads; the newest task's are not calibrated yet. `classes`
    are those of the photos within the newest task.
    """
    newest = columns[-1]
    true = newest.start + classes
    every = candidates(max(adapted))
    scaled, scales = {}, []
    for count in (1, max(adapted)):
        own = adapted[count][-1]
        scales.append(_scale(own, classes))
        scaled[count] = [*adapted[count][:-1], own * _left_out_scales(own, classes)[:, None]]
    tables = []
    for each in every:
        logits = _alone(pooled, columns, each.sharpness)
        if each.weight:
            logits = sharpened(pooled, columns, scaled[each.rotations], each.weight).astype(np.float64)
        tables.append(_row(logits, newest, true))
    nats, wp, cil, tp = (np.stack(parts, axis=1) for parts in zip(*tables, strict=True))
    return JudgedAdapters(nats, wp, tp, cil, np.array(scales))


def _alone(pooled: Array, columns: Sequence[slice], sharpness: float) -> Array:
    """Statistics with an exponent within each task."""
    parts = [(sharpness - 1) * pooled[:, place] for place in columns]
    return sharpened(
        pooled, columns, [pooled[:, place] + part for place, part in zip(columns, parts, strict=True)], 1.0
    )


def _row(logits: Array, newest: slice, true: Classes) -> tuple[Array, Array, Array, Array]:
    """Cross-entropy within the newest task, and whether class within the task, class and task are right; each [m]."""
    rows = np.arange(len(true))
    own = logits[:, newest] - logits[:, newest].max(axis=1, keepdims=True)
    nats = np.log(np.exp(own).sum(axis=1)) - own[rows, true - newest.start]
    found = logits.argmax(axis=1)
    within = own.argmax(axis=1) == true - newest.start
    return nats, within, found == true, (found >= newest.start) & (found < newest.stop)


def _scale(logits: Array, classes: Classes) -> float:
    return temperature_scale(torch.from_numpy(logits.astype(np.float64)), torch.from_numpy(classes))


def _left_out_scales(logits: Array, classes: Classes) -> Array:
    """The scale of each photo's logits, fitted to the photos of other folds."""
    fold = np.arange(len(classes)) % min(FOLDS, len(classes))
    if len(classes) < 2:
        return np.ones(len(classes))
    scales = [_scale(logits[fold != number], classes[fold != number]) for number in range(fold.max() + 1)]
    return np.array(scales)[fold]


def choose(judged: Sequence[JudgedAdapters], rotations: int) -> Choice:
    """The choice of a run, from the validation photos of all its tasks.

    Of the adapters' weights, the one with the smallest cross-entropy is compared with the best that statistics reach
    alone. Adapters are used if they are better beyond chance, and no photo is lost within its task on balance.
    """
    every = candidates(rotations)
    nats = np.concatenate([each.nats for each in judged])
    wp, tp, cil = (np.concatenate([getattr(each, name) for each in judged]) for name in ("wp", "tp", "cil"))

    def best(count: int | None) -> int:
        """The column with the smallest cross-entropy; None: of statistics alone."""
        some = [
            place for place, each in enumerate(every) if (each.weight > 0, each.rotations) == (bool(count), count or 1)
        ]
        return min(some, key=lambda place: float(nats[:, place].sum()))

    def outcome(place: int) -> Outcome:
        return Outcome(*(float(each[:, place].mean()) for each in (wp, tp, cil, nats)))

    alone, upright, turned = best(None), best(1), best(rotations)
    earned = _better(nats[:, alone], nats[:, upright], WORTH_ADAPTERS) and wp[:, upright].sum() >= wp[:, 0].sum()
    before, chosen = (upright, upright) if earned else (alone, upright)
    if rotations > 1 and _better(nats[:, before], nats[:, turned], WORTH_ROTATIONS):
        gain = float(wp[:, turned].mean()) - float(max(wp[:, 0].mean(), wp[:, before].mean()))
        if gain >= LEAST_GAIN:
            earned, chosen = True, turned
    found = every[chosen]
    weight = found.weight if earned else 0.0
    return Choice(weight, found.rotations if earned else 1, found, len(nats), outcome(0), outcome(chosen))


def _better(before: Array, after: Array, errors: float) -> bool:
    """Whether the mean falls by more than this number of standard errors of the paired differences."""
    gains = (before - after).astype(np.float64)
    return bool(gains.mean() > errors * gains.std() / np.sqrt(max(len(gains), 1)))
