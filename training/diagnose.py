"""Which of WP or TP holds each task of a run back, by accuracy and by the theory, and how full the network is.

`python -m training.diagnose RUN [--data ...] [--json] [--out plot.png] [--samples losses.csv]`
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from training import plots
from training.capacity import Capacity, LayerUse
from training.checkpoint import RunError
from training.diagnosis import Confusion, Diagnosis, TaskDiagnosis, confusion_matrix, diagnose
from training.evaluate import Tested, examine_chosen, run_parser
from training.images import DataError

MOST_PAIRS = 8
BESIDES_TASKS, TASK_COLUMN = 50, 6
"""Characters that the table of layers needs without tasks, and for each of them."""


def print_tables(tested: Tested, found: Diagnosis) -> None:
    """The diagnosis on standard output."""
    console = Console()
    console.print(_tasks_table(tested, found))
    _note(console, "costs: CIL accuracy that a perfect WP (or TP) would add, % of the images")
    console.print(_losses_table(found))
    _note(console, f"H_OOD,k: of task k's own detector P'_k = {found.detector}")
    console.print(_theorems_table(found))
    _note(console, "holds: images within the bound; useful: whose bound is below a guess's loss")
    console.print(_confusions_table("tasks taken for each other", found.task_confusions))
    console.print(_confusions_table("classes taken for each other", found.class_confusions))
    console.print(_capacity_table(found.capacity, console.width))
    if found.capacity.frozen_weights is not None:
        console.print(
            f"{_percent(found.capacity.frozen_weights)} % of the weights that answer are protected and learn no more"
        )


def _note(console: Console, words: str) -> None:
    console.print(words, style="dim", highlight=False)


def _tasks_table(tested: Tested, found: Diagnosis) -> Table:
    table = Table(title=f"{tested.run.title}: what holds each task back")
    table.add_column("task")
    table.add_column("classes", overflow="fold", max_width=30)
    for name in ("images", "CIL\n%", "WP\ncosts", "TP\ncosts"):
        table.add_column(name, justify="right")
    table.add_column("held\nback by")
    for task, each in enumerate(found.tasks):
        labels = escape(", ".join(tested.run.config.tasks[task]))
        table.add_row(str(task), labels, *(["0", *["-"] * 4] if each is None else _task_cells(each)))
    table.add_section()
    table.add_row("all", "", *_task_cells(found.whole))
    return table


def _task_cells(each: TaskDiagnosis) -> list[str]:
    shares = (each.cil_accuracy, each.lost_to_wp, each.lost_to_tp)
    return [str(each.images), *map(_percent, shares), each.held_back_by]


def _losses_table(found: Diagnosis) -> Table:
    table = Table(title="what each task loses, mean nats")
    table.add_column("task")
    for name in ("H_WP", "H_TP", "H_CIL", "H_OOD,k\nof its own", "H_OOD,k\nof others", "H_OOD,k"):
        table.add_column(name, justify="right")
    for task, (each, detector) in enumerate(zip(found.tasks, found.detectors, strict=True)):
        own = (None,) * 3 if each is None else (each.nats_wp, each.nats_tp, each.nats_cil)
        table.add_row(str(task), *map(_nats, (*own, *detector)))
    table.add_section()
    whole = (found.whole.nats_wp, found.whole.nats_tp, found.whole.nats_cil)
    table.add_row("all", *map(_nats, whole), "", "", _nats(float(np.mean([each.all for each in found.detectors]))))
    return table


def _theorems_table(found: Diagnosis) -> Table:
    table = Table(title="the theorems on this run, nats")
    for name in ("", "bounds"):
        table.add_column(name)
    for name in ("measured\nmean", "bound\nmean", "bound\nmedian", "holds", "useful"):
        table.add_column(name, justify="right")
    for each in (claim.summary() for claim in found.claims):
        means = (each.measured_mean, each.bound_mean, each.bound_median)
        table.add_row(each.theorem, each.says, *map(_nats, means), str(each.holds), str(each.useful))
    return table


def _nats(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


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
    draws = (
        plots.held_back(found),
        plots.confusion(between, names, "Tasks confused"),
        plots.theorems(found.claims),
        plots.room(found.capacity),
    )
    try:
        plots.save_picture(path, draws, columns=2)
    except OSError as error:
        raise RunError(f"--out {path}: cannot be written ({error.strerror})") from error


def samples_file(text: str) -> Path:
    """A file name on a command line that says what kind of table is wanted."""
    path = Path(text)
    if path.suffix not in (".csv", ".npz"):
        raise argparse.ArgumentTypeError(f"{text!r} ends in {path.suffix!r}; allowed: .csv, .npz")
    return path


def samples(tested: Tested, found: Diagnosis) -> dict[str, NDArray[Any]]:
    """A column for everything about each known test image, in the order of the test images."""
    lost, verdicts, labels = tested.losses, tested.verdicts, np.array(tested.run.config.labels)
    columns: dict[str, NDArray[Any]] = {
        "label": tested.known.labels,
        "task": tested.tasks,
        "said_label": labels[verdicts.class_id],
        "said_task": verdicts.task,
        "h_wp": lost.wp,
        "h_tp": lost.tp,
        "h_cil": lost.cil,
        **{f"h_ood_{task}": lost.ood[:, task] for task in range(lost.ood.shape[1])},
    }
    for claim in found.claims:
        name = "theorem_" + claim.theorem.replace(".", "").replace(" ", "_")
        columns |= {f"{name}_measured": claim.measured, f"{name}_bound": claim.bound}
    return columns


def save_samples(path: Path, columns: Mapping[str, NDArray[Any]]) -> None:
    """As a table with a head line, or as arrays by name."""
    try:
        if path.suffix == ".npz":
            np.savez_compressed(path, **columns)  # type: ignore[arg-type]
            return
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(columns)
            writer.writerows(zip(*(values.tolist() for values in columns.values()), strict=True))
    except OSError as error:
        raise RunError(f"--samples {path}: cannot be written ({error.strerror})") from error


def main(arguments: list[str] | None = None) -> int:
    parser = run_parser("training.diagnose", __doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--out", type=plots.picture, metavar="PLOT", help="draw it too, into a file such as plot.png")
    parser.add_argument(
        "--samples", type=samples_file, metavar="FILE", help="write every image's losses and bounds into a .csv or .npz"
    )
    chosen = parser.parse_args(arguments)
    try:
        tested = examine_chosen(chosen)
        found = diagnose(tested)
        if chosen.out is not None:
            save_plot(chosen.out, tested, found)
        if chosen.samples is not None:
            save_samples(chosen.samples, samples(tested, found))
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
