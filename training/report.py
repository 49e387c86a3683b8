"""What a person sees of a run: progress while it learns, a table when it is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from training.config import system_title

SILENCE = 60.0
"""After so many seconds without a word, a log that has no bar to watch gets a line."""


ENDLESS = 10_000
"""Columns, for how wide a table would like to be."""


class EpochBar:
    """Advances by one epoch at a time and shows the loss."""

    def __init__(self, progress: Progress, name: str, done: int, total: int, mention: Callable[[str], None]) -> None:
        self._progress = progress
        self._bar = progress.add_task(name, total=total, completed=done, loss="")
        self._name, self._done, self._total = name, done, total
        self._mention = mention

    def advance(self, loss: float) -> None:
        self._done += 1
        self._progress.update(self._bar, advance=1, loss=f"loss {loss:.3f}")
        if self._done < self._total:
            self._mention(f"{self._name} {self._done}/{self._total} loss {loss:.3f}")


class Reporter:
    """Progress bars on a terminal; where there is none, a line a phase and one a minute, so that logs stay readable."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.console = Console(stderr=True)
        self._clock = clock
        self._spoke = clock()

    def say(self, text: str) -> None:
        # One line, as it is: what it says may be a command to be copied.
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)
        self._spoke = self._clock()

    def _mention(self, text: str) -> None:
        """Say it where nobody sees a bar and nothing was said for a while."""
        if not self.console.is_terminal and self._clock() - self._spoke >= SILENCE:
            self.say(text)

    @contextmanager
    def bar(self, name: str, done: int, total: int) -> Iterator[EpochBar]:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self._spoke = self._clock()
        with Progress(*columns, console=self.console) as progress:
            yield EpochBar(progress, name, done, total, self._mention)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f} %"


def _reading(result: Mapping[str, Any]) -> str:
    """How the run was read, where it was not by the rule that is served."""
    if result["prediction"] == "served":
        return ""
    chosen = [f"{name} {result[name]}" for name in ("tau", "nu", "temperature", "epsilon") if name in result]
    return f", read by {result['prediction']} ({', '.join(chosen)})"


def summary(result: Mapping[str, Any]) -> None:
    """The metrics of a run as tables on standard output."""
    console = Console()
    system = system_title(result["method"], result["loss"])
    table = Table(title=f"{result['preset']}, {system}, seed {result['seed']}{_reading(result)}")
    table.add_column("measure")
    table.add_column("value", justify="right")
    table.add_column("what it says")
    table.add_row("CIL accuracy", _percent(result["cil_accuracy"]), "right class among all classes of all tasks")
    table.add_row("TIL accuracy", _percent(result["til_accuracy"]), "right class when the task is given (WP)")
    table.add_row("TP accuracy", _percent(result["tp_accuracy"]), "right task")
    if result["task_auroc"] is not None:
        table.add_row("task AUROC", f"{result['task_auroc']:.4f}", "each task's own images against the other tasks'")
    average = _percent(result["average_incremental_accuracy"])
    table.add_row("average incremental", average, "mean CIL accuracy after each task, over the classes learned by then")
    table.add_row("forgetting", _percent(result["forgetting"]), "CIL accuracy lost since a task was learned")
    table.add_row("ECE", _percent(result["ece"]), "how far confidence is from accuracy, CIL")
    counts = result["parameters"]
    own = f"at inference; task 0 alone has {counts['per_task'][0]:,} of them"
    table.add_row("parameters", f"{counts['inference']:,}", own)
    table.add_section()
    table.add_row("known accepted", _percent(result["accepted_known"]), "at the run's alpha")
    if unknown := result["unknown"]:
        table.add_row("unknown AUROC", f"{unknown['auroc']:.4f}", "learned classes against classes never learned")
        table.add_row(
            "unknown AUPR", f"{unknown['aupr']:.4f}", f"unknown positive; known positive: {unknown['aupr_known']:.4f}"
        )
        table.add_row("OSCR", f"{unknown['oscr']:.4f}", "knowns accepted and right, over unknowns accepted")
        table.add_row("FPR at 95 %", _percent(unknown["fpr95"]), "unknowns let through when 95 % of knowns are")
        table.add_row("unknown rejected", _percent(unknown["rejected_unknown"]), "at the run's alpha")
    console.print(table)
    console.print(_over_time(result["after_each_task"]))
    matrix = _matrix(result["accuracy_matrix"])
    if console.measure(matrix, options=console.options.update(max_width=ENDLESS)).maximum <= console.width:
        console.print(matrix)
    else:
        # Columns that are cut to fit would hold nothing but dots.
        tasks = len(result["accuracy_matrix"])
        console.print(f"CIL accuracy on each of the {tasks} tasks after each of them: see report.html")


def _over_time(accuracies: Sequence[Mapping[str, float | None]]) -> Table:
    """The run after each of its tasks."""
    table = Table(title="after each task, all test images of the tasks learned by then, %")
    table.add_column("after")
    for name in ("CIL", "TIL", "TP", "forgetting"):
        table.add_column(name, justify="right")
    for task, each in enumerate(accuracies):
        values = (each[name] for name in ("cil_accuracy", "til_accuracy", "tp_accuracy", "forgetting"))
        table.add_row(f"task {task}", *map(_short_percent, values))
    return table


def _matrix(rows: Sequence[Sequence[float | None]]) -> Table:
    table = Table(title="CIL accuracy on each task's test images, % (row: after learning that task)")
    table.add_column("after")
    for task in range(len(rows)):
        table.add_column(f"task {task}", justify="right")
    for task, row in enumerate(rows):
        table.add_row(f"task {task}", *map(_short_percent, row))
    return table


def _short_percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"
