"""A diagnosis as tables on standard output, as a plot, and as one row per image."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from training.measure.capacity import Capacity
from training.measure.diagnosis import Confusion, Diagnosis, TaskDiagnosis, confusion_matrix
from training.measure.evaluation import Evaluation
from training.run import RunError
from training.show import plots
from training.show.console import numbers, over_time_table, shown

MOST_PAIRS = 8
NO_CAPACITY = "capacity: not available, because this run has statistics only and no network that could fill up"
FIXED_WIDTH, TASK_WIDTH = 50, 6
"""Characters that the table of layers needs without tasks, and per task."""


def print_tables(evaluation: Evaluation, found: Diagnosis) -> None:
    console = Console()
    console.print(_tasks_table(evaluation, found))
    _note(console, "costs: CIL accuracy that a perfect WP (or TP) would add, % of the images")
    console.print(over_time_table(found.after_each_task))
    for name, sentence in found.forgetting_in_words.items():
        _note(console, f"{name.replace('_', ' ')}: {sentence}")
    console.print(_losses_table(found))
    _note(console, f"H_OOD,k: loss of the detector of task k, P'_k = {found.detector}")
    console.print(_theorems_table(found))
    _note(console, "holds: images within the bound; useful: images whose bound is below the loss of guessing")
    console.print(_confusions_table("confused tasks", found.task_confusions))
    console.print(_confusions_table("confused classes", found.class_confusions))
    if found.capacity is None:
        _note(console, NO_CAPACITY)
        return
    console.print(_capacity_table(found.capacity, console.width))
    if found.capacity.frozen_weights is not None:
        frozen = shown(found.capacity.frozen_weights, 1, 100)
        console.print(f"{frozen} % of the weights used at inference are protected from later tasks")


def _note(console: Console, text: str) -> None:
    console.print(text, style="dim", highlight=False)


def _tasks_table(evaluation: Evaluation, found: Diagnosis) -> Table:
    classes, title = Column("classes", overflow="fold", max_width=30), f"{evaluation.run.title}: what limits each task"
    columns = numbers("images", "CIL\n%", "WP\ncosts", "TP\ncosts")
    table = Table("task", classes, *columns, "limited\nby", title=title)
    for task, each in enumerate(found.tasks):
        labels = escape(", ".join(evaluation.run.config.tasks[task]))
        table.add_row(str(task), labels, *(["0", *["-"] * 4] if each is None else _task_cells(each)))
    table.add_section()
    table.add_row("all", "", *_task_cells(found.whole))
    return table


def _task_cells(each: TaskDiagnosis) -> list[str]:
    shares = (each.cil_accuracy, each.lost_to_wp, each.lost_to_tp)
    return [str(each.images), *(shown(share, 1, 100) for share in shares), each.held_back_by]


def _losses_table(found: Diagnosis) -> Table:
    columns = numbers("H_WP", "H_TP", "H_CIL", "H_OOD,k\nown images", "H_OOD,k\nothers", "H_OOD,k")
    table = Table("task", *columns, title="loss of each task, mean nats")
    for task, (each, detector) in enumerate(zip(found.tasks, found.detectors, strict=True)):
        own = (None,) * 3 if each is None else (each.nats_wp, each.nats_tp, each.nats_cil)
        table.add_row(str(task), *map(shown, (*own, *detector)))
    table.add_section()
    whole = (found.whole.nats_wp, found.whole.nats_tp, found.whole.nats_cil)
    table.add_row("all", *map(shown, whole), "", "", shown(float(np.mean([each.all for each in found.detectors]))))
    return table


def _theorems_table(found: Diagnosis) -> Table:
    columns = numbers("measured\nmean", "bound\nmean", "bound\nmedian", "holds", "useful")
    table = Table("", "bounds", *columns, title="the theorems on this run, nats")
    for each in (check.summary() for check in found.bounds):
        means = (shown(each[name]) for name in ("measured_mean", "bound_mean", "bound_median"))
        table.add_row(each["theorem"], each["statement"], *means, str(each["holds"]), str(each["useful"]))
    return table


def _confusions_table(title: str, pairs: Sequence[Confusion]) -> Table:
    left_out = f" (the {MOST_PAIRS} most frequent of {len(pairs)} pairs)" if len(pairs) > MOST_PAIRS else ""
    table = Table("true", "predicted", *numbers("images", "% of the true"), title=title + left_out)
    for pair in pairs[:MOST_PAIRS]:
        table.add_row(escape(pair.true), escape(pair.predicted), str(pair.images), shown(pair.share, 1, 100))
    if not pairs:
        table.add_row("none", "", "0", "")
    return table


def _capacity_table(found: Capacity, width: int) -> Table:
    tasks = len(found.whole.used)
    fits = FIXED_WIDTH + tasks * TASK_WIDTH <= width
    which = "task, by two or more, by none" if fits else "two or more tasks, by none (--json: by each task)"
    columns = numbers(found.of, *map(str, range(tasks if fits else 0)), "shared", "free")
    table = Table("layer", *columns, title=f"% of {found.of} used by {which}")
    for layer in (*found.layers, found.whole):
        shares = (*(layer.used if fits else ()), layer.shared, layer.free)
        cells = (shown(share, 0, 100) for share in shares)
        table.add_row(layer.name, str(layer.size), *cells, end_section=layer is found.layers[-1])
    return table


def save_plot(path: Path, evaluation: Evaluation, found: Diagnosis) -> None:
    names = [f"task {task}" for task in range(len(found.tasks))]
    between = confusion_matrix(evaluation.tasks, evaluation.verdicts.task, len(names))
    draws = (
        plots.losses_per_task(found),
        plots.confusion(between, names, "Tasks confused"),
        plots.theorems(found.bounds),
        *(() if found.capacity is None else (plots.first_use(found.capacity),)),
    )
    plots.save_picture(path, draws, columns=2)


def samples(evaluation: Evaluation, found: Diagnosis) -> dict[str, NDArray[Any]]:
    """One column per quantity, one row per known test image, in the order of the test images."""
    losses, verdicts = evaluation.losses, evaluation.verdicts
    labels = np.array(evaluation.run.config.labels)
    columns: dict[str, NDArray[Any]] = {
        "label": evaluation.known.labels,
        "task": evaluation.tasks,
        "predicted_label": labels[verdicts.class_id],
        "predicted_task": verdicts.task,
        "h_wp": losses.wp,
        "h_tp": losses.tp,
        "h_cil": losses.cil,
        **{f"h_ood_{task}": losses.ood[:, task] for task in range(losses.ood.shape[1])},
    }
    for check in found.bounds:
        name = "theorem_" + check.theorem.replace(".", "").replace(" ", "_")
        columns |= {f"{name}_measured": check.measured, f"{name}_bound": check.bound}
    return columns


def save_samples(path: Path, columns: Mapping[str, NDArray[Any]]) -> None:
    """Write a .csv with a header line, or an .npz with one array per column."""
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
