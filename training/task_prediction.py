"""The paper's definitions of task prediction (TP), to be compared on the same logits: pure functions of arrays.

P(x in class j of task k) = WP_kj * TP_k with WP_kj = softmax(f_kj / nu) within the task and, for each task's own
detector P'_k in [0, 1],

    TP_k = P'_k^(1 / tau_k) / sum_i P'_i^(1 / tau_i)

where every tau_k near 0 gives all to the task with the largest P'_k: the argmax of the concatenated logits.
The rule that is served is another one (serving.decision); nothing here changes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from serving.decision import Outputs, Rule, Verdicts
from training.calibration import Correction, corrected
from training.theory import Detectors

Array = NDArray[np.floating[Any]]
Ids = NDArray[np.integer[Any]]

EXPONENTS = np.logspace(-6, 2, 81)
"""What the search for every tau_k starts from."""
STEPS, DAMPING, LIMIT = 100, 1e-6, 20.0


@dataclass(frozen=True)
class Definition:
    """One way to define TP, and the WP beside it."""

    detector: Literal["sigmoid", "softmax"]
    """P'_k: sigmoid of the task's largest logit, or its largest softmax at `temperature`."""
    taus: tuple[float, ...] = (1.0,)
    """tau_k of every task, or one for all; none: the limit of 0, which leaves only the best task."""
    temperature: float = 1.0
    nu: float = 1.0

    def __post_init__(self) -> None:
        if min((*self.taus, self.temperature, self.nu)) <= 0:
            raise ValueError(f"tau, nu and temperature must be above 0; got {self}")


DEFINITIONS: dict[str, Definition] = {
    "argmax": Definition("sigmoid", taus=()),
    "sigmoid": Definition("sigmoid"),
    "softmax": Definition("softmax", temperature=5.0, nu=0.1),
    "power": Definition("sigmoid"),
}
"""The paper's: concatenated argmax; OOD_k / sum; the largest softmax with its tau and nu; exponents 1 / tau_k."""

ODIN = Definition("softmax", taus=())
"""ODIN's scores are probabilities already: the largest of all tasks' wins."""


def with_settings(name: str, taus: Sequence[float] = (), nu: float | None = None) -> Definition:
    """A named definition with other numbers than the paper's; `taus` of softmax is its temperature."""
    definition = DEFINITIONS[name]
    if (taus or nu is not None) and name == "argmax":
        raise ValueError("argmax has neither tau nor nu; allowed with: sigmoid (nu), softmax, power")
    if taus and name == "sigmoid":
        raise ValueError("sigmoid has tau 1; with another it is called power")
    if taus and name == "softmax":
        if len(taus) > 1:
            raise ValueError(f"softmax has one tau for all tasks; got {len(taus)}")
        definition = replace(definition, temperature=taus[0])
    elif taus:
        definition = replace(definition, taus=tuple(taus))
    return definition if nu is None else replace(definition, nu=nu)


def within_task(logits: Array, task_of_class: Ids, nu: float = 1.0) -> Array:
    """WP: softmax(f / nu) within each task, [n, classes]."""
    return np.exp(_log_softmax(logits / nu, task_of_class))


def detectors(logits: Array, task_of_class: Ids, definition: Definition) -> Detectors:
    """P'_k of every task."""
    if definition.detector == "sigmoid":
        return Detectors.of_log_odds(_largest(logits, task_of_class))
    return Detectors.of(np.exp(log_detector(logits, task_of_class, definition)))


def log_detector(logits: Array, task_of_class: Ids, definition: Definition) -> Array:
    """log P'_k, [n, tasks]."""
    if definition.detector == "sigmoid":
        return Detectors.of_log_odds(_largest(logits, task_of_class)).log_in
    return _largest(_log_softmax(logits / definition.temperature, task_of_class), task_of_class)


def detector_order(logits: Array, task_of_class: Ids, definition: Definition) -> Array:
    """Rises with P'_k [n, tasks], and still tells tasks apart where rounding has made every P'_k a one."""
    if definition.detector == "sigmoid":
        return _largest(logits, task_of_class)
    return log_detector(logits, task_of_class, definition)


def task_probability(logits: Array, task_of_class: Ids, definition: Definition) -> Array:
    """TP, [n, tasks]."""
    if not definition.taus:
        best = detector_order(logits, task_of_class, definition).argmax(axis=1)
        only: Array = np.eye(int(task_of_class.max()) + 1)[best]
        return only
    detected = log_detector(logits, task_of_class, definition)
    # Before all tasks were learned, the first ones had their own.
    taus = definition.taus if len(definition.taus) == 1 else definition.taus[: detected.shape[1]]
    return normalised_power(detected, taus)


def normalised_power(log_detected: Array, taus: Sequence[float] | Array) -> Array:
    """P'_k^(1 / tau_k) / sum_i P'_i^(1 / tau_i) from log P' [n, tasks]."""
    weighted = log_detected / np.asarray(taus)
    raised = np.exp(weighted - weighted.max(axis=1, keepdims=True))
    share: Array = raised / raised.sum(axis=1, keepdims=True)
    return share


def fit_exponents(log_detected: Array, tasks: Ids) -> tuple[float, ...]:
    """The tau_k with the smallest cross-entropy of TP, from log P' [n, tasks] of images and their tasks [n].

    Newton's method in log(1 / tau), which keeps every tau above 0, from the best tau that all share.
    """
    count = log_detected.shape[1]
    shared = min(EXPONENTS, key=lambda tau: _exponent_cost(np.full(count, -np.log(tau)), log_detected, tasks)[0])
    found = np.full(count, -np.log(shared))
    cost, slope, curvature = _exponent_cost(found, log_detected, tasks)
    for _ in range(STEPS):
        step = np.clip(np.linalg.solve(curvature + DAMPING * np.eye(count), slope), -1, 1)
        while (trial := _exponent_cost(found - step, log_detected, tasks))[0] > cost and np.abs(step).max() > 1e-9:
            step = step / 2
        if trial[0] >= cost or np.abs(found - step).max() > LIMIT:
            break
        found, (cost, slope, curvature) = found - step, trial
    return tuple(map(float, np.exp(-found)))


def _exponent_cost(logs: Array, log_detected: Array, tasks: Ids) -> tuple[float, Array, Array]:
    """Cross-entropy of TP at log(1 / tau_k), its gradient, and the part of its Hessian that is never negative."""
    count, rows = len(tasks), np.arange(len(tasks))
    weighted = log_detected * np.exp(logs)
    weighted_share = normalised_power(log_detected, np.exp(-logs))
    error = weighted_share.copy()
    error[rows, tasks] -= 1
    expected = weighted_share * weighted
    curvature = np.diag((expected * weighted).mean(axis=0)) - expected.T @ expected / count
    cost = -np.log(np.maximum(weighted_share[rows, tasks], 1e-300)).mean()
    return float(cost), (error * weighted).mean(axis=0), curvature


@dataclass(frozen=True)
class TaskPredictor:
    """A decision by one definition, for the metrics of an evaluation; it stands where serving.decision.judge does.

    `corrections[i]` are the tasks' scales and shifts after task i was learned; none: the logits as they are.
    `memory` are the unknown scores of validation images, ascending, which p-values are ranked among.
    """

    definition: Definition
    corrections: Sequence[Sequence[Correction]] = ()
    memory: Array | None = None

    def __call__(
        self, outputs: Outputs, rule: Rule, *, alpha: float | None = None, given_task: int | None = None
    ) -> Verdicts:
        """Decide every row of logits [n, classes]; `unknown_score` is -max_k of what rises with P'_k."""
        task_of_class = rule.task_of_class
        logits = self.logits(outputs, rule)
        within = within_task(logits, task_of_class, self.definition.nu)
        p_task = task_probability(logits, task_of_class, self.definition)
        foreign = -detector_order(logits, task_of_class, self.definition)
        level = rule.alpha if alpha is None else alpha
        return verdicts_of(logits, within, p_task, foreign, task_of_class, self.memory, level, given_task)

    def logits(self, outputs: Outputs, rule: Rule) -> Array:
        """The logits that are read: corrected as they were when so many tasks were learned."""
        stage = len(rule.tasks) - 1
        said = outputs["logits_then"][:, :, stage] if "logits_then" in outputs else outputs["logits"]
        logits: Array = np.asarray(said, dtype=np.float64)
        if not self.corrections:
            return logits
        return corrected(logits, self.corrections[stage], rule.task_of_class)

    def detectors(self, outputs: Outputs, rule: Rule) -> Detectors:
        """P'_k of every task, which TP is made from."""
        return detectors(self.logits(outputs, rule), rule.task_of_class, self.definition)

    def remembering(self, outputs: Outputs, rule: Rule) -> TaskPredictor:
        """The same with the unknown scores of validation images in mind."""
        return replace(self, memory=np.sort(self(outputs, rule).unknown_score))


def verdicts_of(
    logits: Array,
    within: Array,
    p_task: Array,
    foreign: Array,
    task_of_class: Ids,
    memory: Array | None,
    alpha: float,
    given_task: int | None,
) -> Verdicts:
    """Decide from WP [n, classes], TP and how foreign an image is to each task [n, tasks], for all tasks or one."""
    unknown = foreign.min(axis=1)
    if given_task is not None:
        p_task = np.zeros_like(p_task)
        p_task[:, given_task] = 1.0
        unknown = foreign[:, given_task]
    probability = within * p_task[:, task_of_class]
    # Within a task the largest logit wins, also where rounding has left several classes a one or a zero.
    reachable = np.where(probability == probability.max(axis=1, keepdims=True), logits, -np.inf)
    class_id = reachable.argmax(axis=1)
    p_value = p_values(unknown, memory)
    return Verdicts(
        class_id=class_id,
        task=task_of_class[class_id],
        known=p_value >= alpha,
        p_value=p_value,
        unknown_score=unknown,
        task_unknown_score=foreign,
        p_task=p_task,
        p_within_task=within,
        probability=probability,
    )


def p_values(unknown: Array, memory: Array | None) -> Array:
    """How many of the scores in memory, which ascend, are at least as high: conformal p-values; 1 without a memory."""
    if memory is None:
        return np.ones(len(unknown))
    at_least = len(memory) - np.searchsorted(memory, unknown, side="left")
    p_value: Array = (1 + at_least) / (len(memory) + 1)
    return p_value


def _starts(task_of_class: Ids) -> Ids:
    return np.flatnonzero(np.diff(task_of_class, prepend=-1))


def _largest(values: Array, task_of_class: Ids) -> Array:
    """The largest value of each task, [n, tasks]."""
    largest: Array = np.maximum.reduceat(values, _starts(task_of_class), axis=1)
    return largest


def _log_softmax(values: Array, task_of_class: Ids) -> Array:
    """log softmax within each task."""
    lowered = values - _largest(values, task_of_class)[:, task_of_class]
    total: Array = np.log(np.add.reduceat(np.exp(lowered), _starts(task_of_class), axis=1))
    return lowered - total[:, task_of_class]
