"""The comparison of decisions as a table on standard output, and as a plot."""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from rich.console import Console
from rich.table import Table

from training.measure.comparison import DecisionRow
from training.run import Run
from training.show import plots
from training.show.console import numbers, shown


def print_table(run: Run, rows: Sequence[DecisionRow], counts: tuple[int, int]) -> None:
    title = f"{run.title}: {counts[0]} known and {counts[1]} unknown test images, alpha {run.rule.alpha:g}"
    columns = ("CIL %", "TP %", "task AUROC", "accepted %", "unknown AUROC", "FPR@95 %", "OSCR", "rejected %")
    table = Table("decision", *numbers(*columns), title=title)
    for row in rows:
        name = f"{row.decision} (chosen)" if row.chosen else row.decision
        values = zip(row[2:], columns, strict=True)
        cells = (shown(value, 2, 100) if column.endswith("%") else shown(value, 4) for value, column in values)
        table.add_row(name, *cells, style="bold" if row.chosen else None)
    Console(width=None if sys.stdout.isatty() else 130).print(table)


@plots.drawing
def _bars(axes: Axes, rows: Sequence[DecisionRow], name: str, title: str) -> None:
    measured = [row for row in rows if getattr(row, name) is not None]
    values = [getattr(row, name) for row in measured]
    places = np.arange(len(values))[::-1]
    axes.barh(places, values, color=[plots.KNOWN if row.chosen else plots.LINE for row in measured])
    axes.set_yticks(places, [row.decision for row in measured])
    axes.set(title=title, xlim=(max(0.0, min(values, default=0.0) - 0.05), 1.0))
    for place, value in zip(places, values, strict=True):
        axes.annotate(f"{value:.3f}", (value, place), (-3, 0), textcoords="offset points", ha="right", va="center")


def save_plot(path: Path, rows: Sequence[DecisionRow]) -> None:
    """Bars of CIL and AUROC for every decision; the one that the run chose is coloured."""
    draws = [_bars(rows, "cil", "CIL accuracy"), _bars(rows, "task_auroc", "AUROC of tasks")]
    if any(row.unknown_auroc is not None for row in rows):
        draws.append(_bars(rows, "unknown_auroc", "AUROC of unknown"))
    plots.save_picture(path, draws)
