"""The paper's definitions of task prediction (TP), as pure functions of arrays, to compare them on the same logits.

P(x in class j of task k) = WP_kj * TP_k with WP_kj = softmax(f_kj / nu) within the task and, for each task's own
detector P'_k in [0, 1],

    TP_k = P'_k^(1 / tau_k) / sum_i P'_i^(1 / tau_i)

With every tau_k near 0, the task with the largest P'_k gets all: the argmax of the concatenated logits.
The served rule is another one (serving.bundle.decision); nothing here changes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from serving.bundle.decision import Outputs, Rule, Verdicts
from training.learn.correction import Correction, corrected
from training.measure.theory import DetectorProbabilities

Array = NDArray[np.floating[Any]]
Ids = NDArray[np.integer[Any]]

EXPONENTS = np.logspace(-6, 2, 81)
"""The values of tau among which the search for every tau_k starts."""
STEPS, DAMPING, LIMIT = 100, 1e-6, 20.0


@dataclass(frozen=True)
class Definition:
    """One way to define TP, and the WP beside it."""

    detector: Literal["sigmoid", "softmax"]
    """P'_k: sigmoid of the task's largest logit, or its largest softmax at `temperature`."""
    taus: tuple[float, ...] = (1.0,)
    """tau_k of every task, or one for all; empty: the limit of 0, in which the best task gets all."""
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
"""From the paper: concatenated argmax; OOD_k / sum; the largest softmax with its tau and nu; exponents 1 / tau_k."""

ODIN = Definition("softmax", taus=())
"""ODIN's scores are already probabilities: the task with the largest one wins."""


def with_settings(name: str, taus: Sequence[float] = (), nu: float | None = None) -> Definition:
    """A named definition with other numbers than the paper's; for softmax, `taus` is its temperature."""
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


def log_detector(logits: Array, task_of_class: Ids, definition: Definition) -> Array:
    """log P'_k, [n, tasks]."""
    order = detector_order(logits, task_of_class, definition)
    return DetectorProbabilities.of_log_odds(order).log_in if definition.detector == "sigmoid" else order


def detector_order(logits: Array, task_of_class: Ids, definition: Definition) -> Array:
    """Increases with P'_k [n, tasks], and still orders the tasks when every P'_k was rounded to 1."""
    if definition.detector == "sigmoid":
        return _largest(logits, task_of_class)
    return _largest(_log_softmax(logits / definition.temperature, task_of_class), task_of_class)


def task_probability(logits: Array, task_of_class: Ids, definition: Definition) -> Array:
    """TP, [n, tasks]."""
    if not definition.taus:
        best = detector_order(logits, task_of_class, definition).argmax(axis=1)
        return np.asarray(np.eye(int(task_of_class.max()) + 1)[best])
    detected = log_detector(logits, task_of_class, definition)
    # After fewer tasks, only the first taus apply.
    taus = definition.taus if len(definition.taus) == 1 else definition.taus[: detected.shape[1]]
    return normalised_power(detected, taus)


def normalised_power(log_detected: Array, taus: Sequence[float] | Array) -> Array:
    """P'_k^(1 / tau_k) / sum_i P'_i^(1 / tau_i) from log P' [n, tasks]."""
    weighted = log_detected / np.asarray(taus)
    raised = np.exp(weighted - weighted.max(axis=1, keepdims=True))
    return np.asarray(raised / raised.sum(axis=1, keepdims=True))


def fit_exponents(log_detected: Array, tasks: Ids) -> tuple[float, ...]:
    """The tau_k with the smallest cross-entropy of TP, from log P' [n, tasks] of images and their tasks [n].

    Newton's method in log(1 / tau), which keeps every tau above 0, starting from the best common tau.
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
    """Cross-entropy of TP at log(1 / tau_k), its gradient, and the positive semi-definite part of its Hessian."""
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
    """Decides by one definition of TP; it is called as the served rule, `judge`, is.

    `corrections[i]` are the scales and shifts of the tasks after task i was learned; empty: uncorrected logits.
    `memory` holds the unknown scores of validation images, ascending; p-values are ranks among them.
    """

    definition: Definition
    corrections: Sequence[Sequence[Correction]] = ()
    memory: Array | None = None

    def __call__(self, outputs: Outputs, rule: Rule) -> Verdicts:
        """Decide every row of logits [n, classes]; `unknown_score` is -max_k of `detector_order`."""
        task_of_class = rule.task_of_class
        logits = self.logits(outputs, rule)
        within = within_task(logits, task_of_class, self.definition.nu)
        p_task = task_probability(logits, task_of_class, self.definition)
        foreign = -detector_order(logits, task_of_class, self.definition)
        return verdicts_of(logits, within, p_task, foreign, rule, self.memory)

    def logits(self, outputs: Outputs, rule: Rule) -> Array:
        """The logits that decide, corrected as they were when the tasks of the rule had been learned."""
        stage = len(rule.tasks) - 1
        chosen = outputs["logits_then"][:, :, stage] if "logits_then" in outputs else outputs["logits"]
        logits: Array = np.asarray(chosen, dtype=np.float64)
        if not self.corrections:
            return logits
        return corrected(logits, self.corrections[stage], rule.task_of_class)

    def detectors(self, outputs: Outputs, rule: Rule) -> DetectorProbabilities:
        """P'_k of every task, from which TP is computed."""
        order = detector_order(self.logits(outputs, rule), rule.task_of_class, self.definition)
        if self.definition.detector == "sigmoid":
            return DetectorProbabilities.of_log_odds(order)
        return DetectorProbabilities.of(np.exp(order))

    def with_memory(self, outputs: Outputs, rule: Rule) -> TaskPredictor:
        """This predictor with the unknown scores of these validation outputs as memory."""
        return replace(self, memory=np.sort(self(outputs, rule).unknown_score))


def verdicts_of(
    logits: Array, within: Array, p_task: Array, foreign: Array, rule: Rule, memory: Array | None
) -> Verdicts:
    """Verdicts from logits and WP [n, classes], TP [n, tasks] and unknown scores [n, tasks]."""
    unknown = foreign.min(axis=1)
    probability = within * p_task[:, rule.task_of_class]
    # The largest logit decides between classes whose probabilities were rounded to the same value.
    reachable = np.where(probability == probability.max(axis=1, keepdims=True), logits, -np.inf)
    class_id = reachable.argmax(axis=1)
    p_value = p_values(unknown, memory)
    return Verdicts(
        class_id=class_id,
        task=rule.task_of_class[class_id],
        known=p_value >= rule.alpha,
        p_value=p_value,
        unknown_score=unknown,
        task_unknown_score=foreign,
        p_task=p_task,
        p_within_task=within,
        probability=probability,
    )


def p_values(unknown: Array, memory: Array | None) -> Array:
    """Conformal p-values: the share of the ascending scores in memory that are at least as high; 1 without a memory."""
    if memory is None:
        return np.ones(len(unknown))
    at_least = len(memory) - np.searchsorted(memory, unknown, side="left")
    return np.asarray((1 + at_least) / (len(memory) + 1))


def _starts(task_of_class: Ids) -> Ids:
    return np.flatnonzero(np.diff(task_of_class, prepend=-1))


def _largest(values: Array, task_of_class: Ids) -> Array:
    """The largest value of each task, [n, tasks]."""
    return np.asarray(np.maximum.reduceat(values, _starts(task_of_class), axis=1))


def _log_softmax(values: Array, task_of_class: Ids) -> Array:
    """log softmax within each task."""
    lowered = values - _largest(values, task_of_class)[:, task_of_class]
    total: Array = np.log(np.add.reduceat(np.exp(lowered), _starts(task_of_class), axis=1))
    return lowered - total[:, task_of_class]
