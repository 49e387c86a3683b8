"""The progress of a whole run, whose phases were estimated before it began."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class WholeRun:
    """One bar over all phases: each takes as much of it as it was estimated to take of the time."""

    def __init__(self, console: Console, phases: Mapping[str, float]) -> None:
        """`phases`: how the name of a phase begins -> its estimated seconds."""
        self._left = dict(phases)
        columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f} % of the run")
        more = TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()
        self._progress = Progress(*columns, *more, console=console)
        self._progress.start()
        self._progress.add_task("", total=max(sum(phases.values()), 1e-9))
        (self._bar,) = self._progress.tasks

    def begin(self, name: str) -> float:
        """A phase begins; returns its estimated seconds, 0 if it was not estimated."""
        key = next((each for each in self._left if name.startswith(each)), None)
        self._progress.update(self._bar.id, description=name)
        return 0.0 if key is None else self._left.pop(key)

    def advance(self, seconds: float, name: str) -> None:
        """Work that was estimated to take so long is done."""
        self._progress.update(self._bar.id, advance=seconds, description=name)

    def summary(self) -> str:
        """Such as "35 % of the run, 12 s, about 20 s left"."""
        bar = self._bar
        left = "?" if bar.time_remaining is None else f"{bar.time_remaining:.0f}"
        return f"{bar.percentage:.0f} % of the run, {bar.elapsed or 0:.0f} s, about {left} s left"

    def end(self) -> None:
        self._progress.update(self._bar.id, completed=self._bar.total, description="done")
        self._progress.stop()
