"""How far a batch is, how fast, and how long it will take, on standard error."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from serving.bundle.terminal import duration

TERMINAL_SECONDS, LOG_SECONDS = 0.2, 10.0
"""Between two updates: of one line on a terminal, and of a log."""
RECENT = 60.0
"""Seconds that the rate is measured over."""


class BatchProgress:
    """Counts images; those that an earlier run answered count as done, but not for the rate."""

    def __init__(self, total: int, done: int = 0, output: TextIO | None = None) -> None:
        self._total = total
        self._output = output or sys.stderr
        self._terminal = self._output.isatty()
        self._started = time.monotonic()
        self._shown = self._started if not self._terminal else 0.0
        self._marks = [(self._started, done)]
        self._before = done
        self.done = done
        self.errors = 0

    def start(self) -> None:
        """The first image is answered from now on."""
        self._started = time.monotonic()
        self._marks = [(self._started, self.done)]

    def add(self, images: int, errors: int) -> None:
        self.done += images
        self.errors += errors
        now = time.monotonic()
        if now - self._shown >= (TERMINAL_SECONDS if self._terminal else LOG_SECONDS):
            self._shown = now
            self._marks = [mark for mark in self._marks if now - mark[0] <= RECENT][-600:] or self._marks[-1:]
            self._write(self._line(now))
            self._marks.append((now, self.done))

    def finish(self) -> str:
        """What was done until now, in one line."""
        seconds = time.monotonic() - self._started
        if self._terminal:
            self._output.write("\r\x1b[K")
        answered = self.done - self._before
        rate = answered / seconds if seconds > 0 else 0.0
        earlier = f" and {self._before:,} before" if self._before else ""
        errors = f"; {self.errors:,} have an error" if self.errors else ""
        return f"{answered:,} images in {duration(seconds)}, {rate:,.0f} per second{earlier}{errors}"

    def _line(self, now: float) -> str:
        since, done = self._marks[0]
        rate = (self.done - done) / (now - since) if now > since else 0.0
        left = f"{duration((self._total - self.done) / rate)} left" if rate else "time left not known yet"
        errors = f", {self.errors:,} errors" if self.errors else ""
        share = 100 * self.done / self._total if self._total else 100.0
        return f"{self.done:,} of {self._total:,} images ({share:.1f} %), {rate:,.0f} per second{errors}, {left}"

    def _write(self, line: str) -> None:
        self._output.write(f"\r\x1b[K{line}" if self._terminal else f"{line}\n")
        self._output.flush()
