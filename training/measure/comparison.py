"""Every unknown score and every fusion on one finished run, side by side.

The network runs once; only the decision changes from row to row. The decision that the run chose for itself, on
validation images, is marked. The table is for comparison, and nothing is chosen by it.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from serving.bundle.decision import Rule, Verdicts, judge
from training.data.sources import Sources
from training.measure import metrics
from training.measure.alternative_rules import TPL, AlternativeRule, RuleFitter
from training.measure.evaluation import Evaluation
from training.run import Readings, Run

BY_P_VALUE = "p-values"
"""The p-values of the decision that the run chose, extrapolated beyond 1 / n so that few tasks tie."""


class DecisionRow(NamedTuple):
    """One decision on one run; the last four are None if there are no unknown images."""

    decision: str
    chosen: bool
    cil: float
    tp: float
    task_auroc: float | None
    accepted: float
    unknown_auroc: float | None = None
    fpr95: float | None = None
    oscr: float | None = None
    rejected: float | None = None


def compare(evaluation: Evaluation, sources: Sources, device: torch.device) -> Iterator[DecisionRow]:
    """One row per decision that the run allows, and one for TPL if the run stores images."""
    run, class_ids = evaluation.run, evaluation.class_ids
    yield from decision_rows(run, evaluation.measurements, class_ids)
    if run.buffer is not None:
        tpl = RuleFitter(run, sources, device).fit(AlternativeRule(TPL))
        images = [one.pixels for one in (evaluation.known, evaluation.unknown) if len(one)]
        yield _row(TPL, run, [tpl.decide(tpl.outputs(pixels), run.rule) for pixels in images], class_ids)


def decision_rows(
    run: Run, measurements: Sequence[Readings], class_ids: NDArray[np.integer[Any]]
) -> Iterator[DecisionRow]:
    """From the measurements of every task for the known images, and for the unknown ones if there are any."""
    for decider in run.offered():
        yield _row(decider.name, run, [judge(decider.outputs(each), decider.rule) for each in measurements], class_ids)
    own = [judge(run.decider.outputs(each), run.rule) for each in measurements]
    yield _row(BY_P_VALUE, run, [by_p_value(verdicts, run.rule) for verdicts in own], class_ids)


def by_p_value(verdicts: Verdicts, rule: Rule) -> Verdicts:
    """The same verdicts, but the task with the largest p-value wins instead of the most probable one."""
    task = verdicts.task_unknown_score.argmin(axis=1)
    within = np.where(rule.task_of_class == task[:, None], verdicts.p_within_task, -1.0)
    return verdicts._replace(task=task, class_id=within.argmax(axis=1))


def _row(name: str, run: Run, verdicts: Sequence[Verdicts], class_ids: NDArray[np.integer[Any]]) -> DecisionRow:
    """From the verdicts for the known images, and for the unknown ones if there are any."""
    on_known = verdicts[0]
    true_task = metrics.task_of(class_ids, run.rule)
    row = DecisionRow(
        decision=name,
        chosen=name == run.decider.name,
        cil=float((on_known.class_id == class_ids).mean()),
        tp=float((on_known.task == true_task).mean()),
        task_auroc=metrics.mean_of(metrics.task_auroc(on_known.task_unknown_score, true_task)),
        accepted=float(on_known.known.mean()),
    )
    if len(verdicts) == 1:
        return row
    found = metrics.unknown_metrics(on_known, verdicts[1], class_ids)
    auroc, rejected = found["auroc"], found["rejected_unknown"]
    return row._replace(unknown_auroc=auroc, fpr95=found["fpr95"], oscr=found["oscr"], rejected=rejected)
