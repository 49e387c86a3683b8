"""Console output of training: progress while it learns, tables of metrics at the end."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from serving.bundle.run_verdict import PARTS
from serving.bundle.terminal import escaped
from training.config import system_title
from training.show.whole_run import WholeRun

QUIET_SECONDS = 60.0
"""Without a terminal, progress is printed after this many seconds without output."""
GRADE_STYLES = {"good": "green", "weak": "yellow", "not working": "bold red", "not measured": "dim"}
CLOCK_TIME = "%H:%M:%S"
"""Lines of a log that is not a terminal begin with the time."""
UNLIMITED = 10_000
"""Columns, to measure the full width of a table."""


class Reporter:
    """Progress bars on a terminal; without one, one line per phase and per minute, so that logs stay readable."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        # In a notebook, too, plain lines: its progress bars would need another package.
        self.console = Console(stderr=True, force_jupyter=False)
        self._clock = clock
        self._printed = clock()
        self._whole: WholeRun | None = None

    def print(self, text: str) -> None:
        # Neither wrapped nor formatted: the text may be a command to copy.
        stamped = text if self.console.is_terminal else f"{time.strftime(CLOCK_TIME)} {text}"
        self.console.print(escaped(stamped), highlight=False, markup=False, soft_wrap=True)
        self._printed = self._clock()

    def expect(self, phases: Mapping[str, float]) -> None:
        """From now on one bar covers the whole run: how the name of each phase begins -> its estimated seconds."""
        self._whole = WholeRun(self.console, phases)

    def end(self) -> None:
        """The run ends, or is stopped."""
        if self._whole is not None:
            self._whole.end()
            self._whole = None

    @contextmanager
    def counter(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        """A bar of things that are done one after another; yields a function to call with how many were just done."""
        if self._whole is not None:
            yield self._part_of_run(self._whole, name, total)
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._printed = self._clock()
        with Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=self.console) as progress:
            progress.add_task(name, total=total)
            (bar,) = progress.tasks

            def advance(count: int) -> None:
                progress.update(bar.id, advance=count)
                is_quiet = self._clock() - self._printed >= QUIET_SECONDS
                if is_quiet and not self.console.is_terminal and not bar.finished:
                    left = "?" if bar.time_remaining is None else f"{bar.time_remaining:.0f}"
                    self.print(f"{name} {bar.completed:.0f}/{total}, {bar.elapsed or 0:.0f} s, about {left} s left")

            yield advance

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A part of the whole run, if that was estimated."""
        if self._whole is None:
            yield
            return
        seconds = self._whole.begin(name)
        yield
        self._whole.advance(seconds, name)

    def _part_of_run(self, whole: WholeRun, name: str, total: int) -> Callable[[int], None]:
        seconds, done = whole.begin(name), 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            text = f"{name} {done}/{total}" if total > 1 else name
            whole.advance(seconds * count / max(total, 1), text)
            if self._clock() - self._printed >= QUIET_SECONDS and not self.console.is_terminal:
                self.print(f"{text}, {whole.summary()}")

        return advance

    @contextmanager
    def bar(self, name: str, done: int, total: int) -> Iterator[Callable[[float], None]]:
        """A bar of epochs; yields a function to call with the loss at the end of each of them."""
        if self._whole is not None:
            part = self._part_of_run(self._whole, name, total)
            part(done)
            yield lambda loss: part(1)
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self._printed = self._clock()
        with Progress(*columns, console=self.console) as progress:
            progress.add_task(name, total=total, completed=done, loss="")
            (bar,) = progress.tasks

            def advance(loss: float) -> None:
                progress.update(bar.id, advance=1, loss=f"loss {loss:.3f}")
                is_quiet = self._clock() - self._printed >= QUIET_SECONDS
                if is_quiet and not self.console.is_terminal and not bar.finished:
                    self.print(f"{name} {bar.completed:.0f}/{total} loss {loss:.3f}")

            yield advance


def numbers(*names: str) -> list[Column]:
    """Columns of numbers for a table."""
    return [Column(name, justify="right") for name in names]


def shown(value: float | None, digits: int = 3, times: int = 1) -> str:
    """A number for a table, such as a share in per cent with times=100; "-" if there is none."""
    return "-" if value is None else f"{times * value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f} %"


def _rule(result: Mapping[str, Any]) -> str:
    """The decision rule, if it is not the served one."""
    if result["prediction"] == "served":
        return ""
    chosen = [f"{name} {result[name]}" for name in ("tau", "nu", "temperature", "epsilon") if name in result]
    return f", decided by {result['prediction']} ({', '.join(chosen)})"


def print_summary(result: Mapping[str, Any], console: Console | None = None) -> None:
    console = console or Console()
    print_verdict(console, result["verdict"])
    system = system_title(result["method"], result["loss"])
    title = f"{result['preset']}, {system}, seed {result['seed']}{_rule(result)}"
    table = Table("measure", *numbers("value"), "meaning", title=title)
    table.add_row("CIL accuracy", _percent(result["cil_accuracy"]), "right class among all classes of all tasks")
    table.add_row("TIL accuracy", _percent(result["til_accuracy"]), "right class when the task is given (WP)")
    table.add_row("TP accuracy", _percent(result["tp_accuracy"]), "right task")
    if result["task_auroc"] is not None:
        auroc = shown(result["task_auroc"], 4)
        table.add_row("task AUROC", auroc, "images of each task against those of the other tasks")
    average = _percent(result["average_incremental_accuracy"])
    table.add_row("average incremental", average, "mean CIL accuracy after each task, over the classes learned by then")
    for name, sentence in result["forgetting_in_words"].items():
        table.add_row(name.replace("_", " "), _percent(result[name]), sentence)
    table.add_row(
        "ECE",
        _percent(result["ece"]),
        "mean difference of confidence and accuracy, CIL; confidence is conditional on being known",
    )
    counts = result["parameters"]
    trunk = f" behind {result['trunk']}" if result.get("trunk") else ""
    own = f"at inference{trunk}; task 0 alone has {counts['per_task'][0]:,} of them"
    table.add_row("parameters", f"{counts['inference']:,}", own)
    detectors = f"{result['memory']['detectors_bytes'] / 1e3:,.0f} kB"
    table.add_row("memory of detectors", detectors, result["memory_in_words"])
    table.add_section()
    table.add_row("known accepted", _percent(result["accepted_known"]), "at the run's alpha")
    if unknown := result["unknown"]:
        known_positive = f"unknown positive; known positive: {unknown['aupr_known']:.4f}"
        table.add_row("unknown AUROC", f"{unknown['auroc']:.4f}", "learned classes against classes never learned")
        table.add_row("unknown AUPR", f"{unknown['aupr']:.4f}", known_positive)
        table.add_row("OSCR", f"{unknown['oscr']:.4f}", "known images accepted and right, over unknown ones accepted")
        accepted = _percent(unknown["fpr95"])
        table.add_row("FPR at 95 %", accepted, "unknown images accepted when 95 % of the known ones are")
        table.add_row("unknown rejected", _percent(unknown["rejected_unknown"]), "at the run's alpha")
    console.print(table)
    console.print(over_time_table(result["after_each_task"]))
    matrix = _matrix(result["accuracy_matrix"])
    if console.measure(matrix, options=console.options.update(max_width=UNLIMITED)).maximum <= console.width:
        console.print(matrix)
    else:
        # Columns that are cut to fit would show only dots.
        tasks = len(result["accuracy_matrix"])
        console.print(f"CIL accuracy on each of the {tasks} tasks after each of them: see report.html")


def print_verdict(console: Console, verdict: Mapping[str, Any]) -> None:
    """Print how good each part of the answers is, and what would help."""
    table = Table("verdict", "", "measured", show_lines=False)
    for name, title in PARTS.items():
        part = verdict[name]
        table.add_row(title, Text(part["grade"], style=GRADE_STYLES[part["grade"]]), part["numbers"])
    console.print(table)
    for advice in dict.fromkeys([*(verdict[name]["advice"] for name in PARTS), verdict.get("note")]):
        if advice:
            console.print(advice, highlight=False, markup=False)


OVER_TIME = (
    *("cil_accuracy", "til_accuracy", "tp_accuracy", "forgetting_within_tasks", "lost_to_newer_classes"),
    *("accepted_known", "accepted_known_lowest", "rejected_unknown"),
)
OVER_TIME_TITLES = (
    *("CIL", "TIL", "TP", "forgot\nwithin", "lost\nto\nnewer"),
    *("known\naccepted", "least\ntask", "unknown\nrejected"),
)
"""As narrow as the numbers: the table fits into 80 columns."""


def over_time_table(accuracies: Sequence[Mapping[str, Any]]) -> Table:
    """The run after each of its tasks."""
    rows = [[each[name] for name in OVER_TIME] for each in accuracies]
    title = "after each task, all test images of the tasks learned by then, %"
    return _after_tasks(title, OVER_TIME_TITLES, rows)


def _matrix(rows: Sequence[Sequence[float | None]]) -> Table:
    title = "CIL accuracy on each task's test images, % (row: after learning that task)"
    return _after_tasks(title, [f"task {task}" for task in range(len(rows))], rows)


def _after_tasks(title: str, columns: Sequence[str], rows: Sequence[Sequence[float | None]]) -> Table:
    """One row of shares per task, in per cent."""
    table = Table(*numbers("after\ntask"), *numbers(*columns), title=title)
    for task, row in enumerate(rows):
        table.add_row(str(task), *(shown(value, 1, 100) for value in row))
    return table


def print_groups(found: Mapping[str, Any], min_size: int) -> None:
    """Print the groups of unknown images that `openworld discover` found, as a table."""
    console = Console()
    if not found["images"]:
        console.print("nothing to group: the quarantine has no new unknown image", highlight=False)
        return
    title = f"{found['images']} unknown images, about {found['new_classes']} new classes"
    table = Table(*numbers("group", "images", "cohesion"), "looks like", title=title)
    for number, one in enumerate(found["groups"], start=1):
        near = one["near_class"]
        looks = f"a changed {near}" if one["shifted"] else f"something new, near {near}" if near else "something new"
        table.add_row(str(number), str(one["size"]), f"{one['cohesion']:.2f}", looks)
    table.add_section()
    table.add_row("none", str(found["in_no_group"]), "", f"fewer than {min_size} alike (--min-size)")
    if found["known_by_now"]:
        table.add_row("none", str(found["known_by_now"]), "", "known to this model, or unreadable")
    console.print(table)
    if found["groups"]:
        console.print("next: name the groups on the page /unknowns, then openworld learn-unknowns RUN")
