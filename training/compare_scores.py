"""Every score and every fusion on one finished run, side by side: `python -m training.compare_scores RUN`.

The network is asked once; only how its tasks are compared changes from row to row. What the run chose for itself, on
validation images, is marked: this table is for looking, and nothing is chosen by it.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from models.scores import DECISIONS
from serving.decision import Rule, Verdicts, judge
from training import metrics, plots
from training.checkpoint import RunError
from training.decisions import SaidByTasks, all_said, make_decider
from training.device import choose_device, prepare
from training.evaluate import Run, add_unknown_option, chosen_unknown, known_and_unknown, open_run, reader_of
from training.images import DataError, Images
from training.prediction import TPL, Reading
from training.sources import Sources

BY_P_VALUE = "p-values"
"""Of the decision that the run chose; continued beyond 1 / n, so that few tasks tie."""


class Row(NamedTuple):
    """One decision on one run; the last five are none where there is no unknown image."""

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


def compare(
    run: Run,
    known: Images,
    class_ids: NDArray[np.integer[Any]],
    unknown: Images,
    sources: Sources,
    device: torch.device,
) -> Iterator[Row]:
    """A row for every decision that the run allows, and for TPL's where it keeps images."""
    said = [all_said(run.network, images.pixels, device) for images in (known, unknown) if len(images)]
    yield from decision_rows(run, said, class_ids)
    if run.buffer is not None:
        reader = reader_of(run, sources, device, Reading(TPL))
        images = [one.pixels for one in (known, unknown) if len(one)]
        yield _row(TPL, run, [reader.decide(reader.says(pixels), run.rule) for pixels in images], class_ids)


def decision_rows(run: Run, said: Sequence[SaidByTasks], class_ids: NDArray[np.integer[Any]]) -> Iterator[Row]:
    """From what was said of known images and, where there are any, of unknown ones."""
    for name, decision in DECISIONS.items():
        if decision.corrected and not run.corrections:
            continue
        decider = make_decider(run.network, name, run.rule.alpha, run.corrections)
        yield _row(name, run, [judge(decider.outputs(one), decider.rule) for one in said], class_ids)
    own = [judge(run.decider.outputs(one), run.rule) for one in said]
    yield _row(BY_P_VALUE, run, [_by_p_value(verdicts, run.rule) for verdicts in own], class_ids)


def _by_p_value(verdicts: Verdicts, rule: Rule) -> Verdicts:
    """The run's own scores, where the task with the largest p-value wins instead of the likeliest."""
    task = verdicts.task_unknown_score.argmin(axis=1)
    within = np.where(rule.task_of_class == task[:, None], verdicts.p_within_task, -1.0)
    return verdicts._replace(task=task, class_id=within.argmax(axis=1))


def _row(name: str, run: Run, verdicts: Sequence[Verdicts], class_ids: NDArray[np.integer[Any]]) -> Row:
    """From the verdicts on known images and, where there are any, on unknown ones."""
    on_known = verdicts[0]
    true_task = metrics.task_of(class_ids, run.rule)
    row = Row(
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
    return row._replace(
        unknown_auroc=found["auroc"],
        fpr95=found["fpr95"],
        oscr=found["oscr"],
        rejected=found["rejected_unknown"],
    )


def print_table(run: Run, rows: Sequence[Row], counts: tuple[int, int]) -> None:
    table = Table(title=f"{run.title}: {counts[0]} known and {counts[1]} unknown test images, alpha {run.rule.alpha:g}")
    columns = (
        "decision",
        "CIL %",
        "TP %",
        "task AUROC",
        "accepted %",
        "unknown AUROC",
        "FPR@95 %",
        "OSCR",
        "rejected %",
    )
    for column in columns:
        table.add_column(column, justify="left" if column == "decision" else "right")
    for row in rows:
        values = (_percent(row.cil), _percent(row.tp), _share(row.task_auroc), _percent(row.accepted))
        unknown = (_share(row.unknown_auroc), _percent(row.fpr95), _share(row.oscr), _percent(row.rejected))
        name = f"{row.decision} (chosen)" if row.chosen else row.decision
        table.add_row(name, *values, *unknown, style="bold" if row.chosen else None)
    Console(width=None if sys.stdout.isatty() else 130).print(table)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _bars(rows: Sequence[Row], name: str, title: str) -> plots.Draw:
    def draw(axes: Axes) -> None:
        shown = [(row.decision, getattr(row, name), row.chosen) for row in rows if getattr(row, name) is not None]
        places = np.arange(len(shown))[::-1]
        colours = [plots.KNOWN if chosen else plots.LINE for _, _, chosen in shown]
        axes.barh(places, [value for _, value, _ in shown], color=colours)
        axes.set_yticks(places, [decision for decision, _, _ in shown])
        low = min((value for _, value, _ in shown), default=0.0)
        axes.set(title=title, xlim=(max(0.0, low - 0.05), 1.0))
        for place, (_, value, _) in zip(places, shown, strict=True):
            axes.annotate(f"{value:.3f}", (value, place), (-3, 0), textcoords="offset points", ha="right", va="center")

    return draw


def save_plot(path: Path, rows: Sequence[Row]) -> None:
    """CIL, and where there are unknown images the AUROC, of every decision; what the run chose is in colour."""
    draws = [_bars(rows, "cil", "CIL accuracy"), _bars(rows, "task_auroc", "AUROC of tasks")]
    if any(row.unknown_auroc is not None for row in rows):
        draws.append(_bars(rows, "unknown_auroc", "AUROC of unknown"))
    try:
        plots.save_picture(path, draws)
    except OSError as error:
        raise RunError(f"--out {path}: cannot be written ({error.strerror})") from error


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m training.compare_scores", description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory made by training.fit")
    parser.add_argument("--data", help="where the images are now, if not where they were learned from")
    add_unknown_option(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--out", type=plots.picture, metavar="PLOT", help="draw it too, into a file such as plot.png")
    chosen = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    device = choose_device()
    prepare(device)
    try:
        run = open_run(chosen.run, device)
        sources = Sources(run.config, chosen.data)
        source, _ = sources.test_images()
        known, unknown = known_and_unknown(source, run.config)
        given = chosen_unknown(chosen, run.config)
        unknown = unknown if given is None else given
        class_ids = np.array([run.config.labels.index(str(label)) for label in known.labels])
        rows = list(compare(run, known, class_ids, unknown, sources, device))
        if chosen.out is not None:
            save_plot(chosen.out, rows)
    except (RunError, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if chosen.json:
        result: dict[str, Any] = {"known": len(known), "unknown": len(unknown), "rows": [row._asdict() for row in rows]}
        print(json.dumps(result, indent=2))
    else:
        print_table(run, rows, (len(known), len(unknown)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
