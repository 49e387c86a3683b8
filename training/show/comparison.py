"""The comparison of decisions as a table on standard output, and as a plot."""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from rich.console import Console
from rich.table import Table

from training.measure.comparison import DecisionRow
from training.measure.metrics import mean_of
from training.run import Run
from training.show import plots
from training.show.console import numbers, shown

COLUMNS = ("CIL %", "TP %", "task AUROC", "accepted %", "unknown AUROC", "FPR@95 %", "OSCR", "rejected %")
"""Those of a DecisionRow after its name and whether it was chosen."""


def print_table(run: Run, rows: Sequence[DecisionRow], counts: tuple[int, int]) -> None:
    title = f"{run.title}: {counts[0]} known and {counts[1]} unknown test images, alpha {run.rule.alpha:g}"
    table = Table("decision", *numbers(*COLUMNS), title=title)
    for row in rows:
        name = f"{row.decision} (chosen)" if row.chosen else row.decision
        values = zip(row[2:], COLUMNS, strict=True)
        cells = (shown(value, 2, 100) if column.endswith("%") else shown(value, 4) for value, column in values)
        table.add_row(name, *cells, style="bold" if row.chosen else None)
    Console(width=None if sys.stdout.isatty() else 130).print(table)


CHOICE = "the run's choice"


def _by_name(every: Sequence[Sequence[DecisionRow]]) -> dict[str, list[DecisionRow]]:
    """The rows of several runs by decision; first, what each run chose."""
    found: dict[str, list[DecisionRow]] = {CHOICE: [row for rows in every for row in rows if row.chosen]}
    for rows in every:
        for row in rows:
            found.setdefault(row.decision, []).append(row)
    return found


def means(every: Sequence[Sequence[DecisionRow]]) -> list[DecisionRow]:
    """One row per decision: the only run's, or the means of several."""
    if len(every) == 1:
        return list(every[0])
    found = []
    for name, rows in _by_name(every).items():
        columns = (mean_of(column) for column in zip(*(row[2:] for row in rows), strict=True))
        found.append(DecisionRow(name, name == CHOICE, *columns))  # type: ignore[arg-type]
    return found


def spread(every: Sequence[Sequence[DecisionRow]]) -> str:
    """A Markdown table of several runs: mean and standard deviation of each decision."""
    lines = [f"| decision | {' | '.join(COLUMNS)} |", "|---|" + "---|" * len(COLUMNS)]
    for name, rows in _by_name(every).items():
        of = f" ({len(rows)} of {len(every)} runs)" if len(rows) < len(every) else ""
        columns = zip(*(row[2:] for row in rows), strict=True)
        cells = (_mean_and_deviation(column, title) for column, title in zip(columns, COLUMNS, strict=True))
        lines.append(f"| {name}{of} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _mean_and_deviation(values: Sequence[float | None], column: str) -> str:
    times, digits = (100, 2) if column.endswith("%") else (1, 4)
    measured = [times * value for value in values if value is not None]
    if not measured:
        return "-"
    deviation = np.std(measured, ddof=1) if len(measured) > 1 else 0.0
    return f"{np.mean(measured):.{digits}f} ± {deviation:.{digits}f}"


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
