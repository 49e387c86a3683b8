"""Which of WP or TP holds each task of a run back, what is confused, how full the network is.

`python -m training.diagnose RUN [--data ...] [--json] [--out plot.png]`
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from training import plots
from training.capacity import Capacity, LayerUse
from training.checkpoint import RunError
from training.datasets import DataError
from training.diagnosis import Confusion, Diagnosis, TaskDiagnosis, confusion_matrix, diagnose
from training.evaluate import Tested, examine_chosen, run_parser

MOST_PAIRS = 8
BESIDES_TASKS, TASK_COLUMN = 50, 6
"""Characters that the table of layers needs without tasks, and for each of them."""


def print_tables(tested: Tested, found: Diagnosis) -> None:
    """The diagnosis on standard output."""
    console = Console()
    console.print(_tasks_table(tested, found))
    bound = "says nothing" if found.median_bound is None else f"says at most {found.median_bound:.3f}"
    console.print(
        "costs: CIL accuracy that a perfect WP (or TP) would add, % of the images\n"
        "nats: mean cross-entropies; what CIL loses is the sum of both (Theorem 1)\n"
        f"nats at the median image: CIL loses {np.median(tested.losses.cil):.3f}, Theorem 3 {bound}",
        style="dim",
        highlight=False,
    )
    console.print(_confusions_table("tasks taken for each other", found.task_confusions))
    console.print(_confusions_table("classes taken for each other", found.class_confusions))
    console.print(_capacity_table(found.capacity, console.width))
    if found.capacity.frozen_weights is not None:
        console.print(f"{_percent(found.capacity.frozen_weights)} % of all weights are protected and learn no more")


def _tasks_table(tested: Tested, found: Diagnosis) -> Table:
    table = Table(title=f"{tested.run.title}: what holds each task back")
    table.add_column("task")
    table.add_column("classes", overflow="fold", max_width=30)
    for name in ("images", "CIL\n%", "WP\ncosts", "TP\ncosts", "WP\nnats", "TP\nnats"):
        table.add_column(name, justify="right")
    table.add_column("held\nback by")
    for task, each in enumerate(found.tasks):
        labels = escape(", ".join(tested.run.config.tasks[task]))
        table.add_row(str(task), labels, *(["0", *["-"] * 6] if each is None else _task_cells(each)))
    table.add_section()
    table.add_row("all", "", *_task_cells(found.whole))
    return table


def _task_cells(each: TaskDiagnosis) -> list[str]:
    shares = (each.cil_accuracy, each.lost_to_wp, each.lost_to_tp)
    nats = (each.nats_wp, each.nats_tp)
    return [str(each.images), *map(_percent, shares), *(f"{value:.3f}" for value in nats), each.held_back_by]


def _confusions_table(title: str, pairs: Sequence[Confusion]) -> Table:
    left_out = f" (the {MOST_PAIRS} most frequent of {len(pairs)} pairs)" if len(pairs) > MOST_PAIRS else ""
    table = Table(title=title + left_out)
    for name in ("true", "said"):
        table.add_column(name)
    for name in ("images", "% of the true"):
        table.add_column(name, justify="right")
    for pair in pairs[:MOST_PAIRS]:
        table.add_row(escape(pair.true), escape(pair.said), str(pair.images), _percent(pair.share))
    if not pairs:
        table.add_row("none", "", "0", "")
    return table


def _capacity_table(found: Capacity, width: int) -> Table:
    tasks = len(found.whole.used)
    fits = BESIDES_TASKS + tasks * TASK_COLUMN <= width
    which = "task, by two or more, by none" if fits else "two tasks or more, by none (--json: by each task)"
    table = Table(title=f"% of {found.of} used by {which}")
    table.add_column("layer")
    shown = range(tasks) if fits else range(0)
    for name in (found.of, *map(str, shown), "shared", "free"):
        table.add_column(name, justify="right")

    def add(layer: LayerUse) -> None:
        shares = (*(layer.used[task] for task in shown), layer.shared, layer.free)
        table.add_row(layer.name, str(layer.size), *(f"{100 * share:.0f}" for share in shares))

    for layer in found.layers:
        add(layer)
    table.add_section()
    add(found.whole)
    return table


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def save_plot(path: Path, tested: Tested, found: Diagnosis) -> None:
    """The diagnosis as one picture."""
    names = [f"task {task}" for task in range(len(found.tasks))]
    between = confusion_matrix(tested.tasks, tested.verdicts.task, len(names))
    draws = (plots.held_back(found), plots.confusion(between, names, "Tasks confused"), plots.room(found.capacity))
    try:
        plots.save_picture(path, draws)
    except OSError as error:
        raise RunError(f"--out {path}: cannot be written ({error.strerror})") from error


def main(arguments: list[str] | None = None) -> int:
    parser = run_parser("training.diagnose", __doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--out", type=plots.picture, metavar="PLOT", help="draw it too, into a file such as plot.png")
    chosen = parser.parse_args(arguments)
    try:
        tested = examine_chosen(chosen)
        found = diagnose(tested)
        if chosen.out is not None:
            save_plot(chosen.out, tested, found)
    except (RunError, DataError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if chosen.json:
        print(json.dumps(found.as_json(), indent=2, allow_nan=False))
    else:
        print_tables(tested, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
