"""What the adapters of a run add to statistics alone, on validation photos and on test photos."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.bundle.decision import Verdicts, judge
from training.learn.adapters.choice import Outcome
from training.measure import metrics
from training.run import Readings, Run

ALONE, WITH = "statistics", "with_adapters"


def adapter_gain(
    run: Run, readings: tuple[Readings, ...], class_ids: NDArray[np.integer[Any]]
) -> dict[str, Any] | None:
    """For RUN/metrics.json: what was chosen and why, and what adapters would add on test photos; None without adapters.

    `readings` are those of the known test photos, and of unknown ones if there are any.
    """
    if run.adapters is None:
        return None
    choice = run.adapters.choice
    share = run.adapter_seconds / run.seconds if run.seconds else 0.0
    validation = {ALONE: _rounded(choice.alone), WITH: _rounded(choice.with_adapters)}
    return {
        "used": run.need_pooled().weight > 0,
        "weight": choice.weight,
        "best_weight": choice.best.weight,
        "rotations": choice.rotations,
        "seconds": round(run.adapter_seconds, 1),
        "share_of_time": round(share, 3),
        "validation": {"images": choice.images, **validation},
        "test": _on_test(run, readings, class_ids) if readings else None,
    }


def _rounded(outcome: Outcome) -> dict[str, float]:
    return {name: round(value, 6) for name, value in outcome._asdict().items()}


def _on_test(run: Run, readings: tuple[Readings, ...], class_ids: NDArray[np.integer[Any]]) -> dict[str, Any] | None:
    """None if adapters read rotations that were not encoded, because the decision does without them."""
    deciders = list(run.offered())
    if len(deciders) < 2:
        return None
    found: dict[str, Any] = {"images": len(class_ids)}
    for name, decider in zip((ALONE, WITH), deciders, strict=True):
        found[name] = _measured(run, [judge(decider.outputs(each), decider.rule) for each in readings], class_ids)
    return found


def _measured(run: Run, verdicts: list[Verdicts], class_ids: NDArray[np.integer[Any]]) -> dict[str, Any]:
    known, rule = verdicts[0], run.rule
    rows = np.arange(len(class_ids))
    own = np.maximum(known.p_within_task[rows, class_ids], 1e-12)
    unknown = metrics.unknown_metrics(known, verdicts[1], class_ids) if len(verdicts) > 1 else None
    return {
        "wp": round(float(metrics.right_within_task(known, rule, class_ids).mean()), 6),
        "tp": round(float((known.task == metrics.task_of(class_ids, rule)).mean()), 6),
        "cil": round(float((known.class_id == class_ids).mean()), 6),
        "nats": round(float(-np.log(own).mean()), 6),
        "unknown_auroc": unknown and unknown["auroc"],
    }
