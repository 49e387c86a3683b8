"""The history of a run, one JSON object per line of RUN/history.jsonl: its commands and the loss of every epoch.

A line is written to disk before the checkpoint that includes its epoch. Lines of epochs that no checkpoint includes are
dropped when the run is resumed: after a crash at any point and --resume, every epoch is there once.
"""

import json
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from serving.bundle.atomic import replace_file
from training.store.checkpoint import Progress

HISTORY = "history.jsonl"
PHASES = ("features", "head")
"""The phases of a task, in order."""
_SECRETS = {
    re.compile(r"(://[^:/@\s]*):\S*@"): r"\1:***@",
    re.compile(r"(password[^=&\s]*=)[^&\s]+", re.IGNORECASE): r"\1***",
}
"""Patterns of passwords in URLs, and their replacements."""
_PLACES = {
    "--out": "RUN",
    "--data": "FOLDER",
    "--add-unknowns": "RUN",
    "--trunk-weights": "FILE",
    "--quarantine": "URL",
    "--images": "PLACE",
    "--publish": "SHELF",
}
"""Options whose value is a place on one machine, and what stands for it."""


@dataclass(frozen=True)
class Epoch:
    """The mean loss of one epoch; `epoch` counts from 1."""

    task: int
    phase: str
    epoch: int
    loss: float
    seconds: float

    def kept_by(self, progress: Progress) -> bool:
        """Whether a checkpoint with this progress includes this epoch."""
        mine = (self.task, PHASES.index(self.phase), self.epoch)
        return mine <= (progress.task, PHASES.index(progress.phase), progress.epoch)


class History:
    """The file of one run."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / HISTORY

    @property
    def commands(self) -> list[list[str]]:
        """Every command that trained this run, oldest first, without passwords."""
        return [line["command"] for line in self._lines() if "command" in line]

    @property
    def epochs(self) -> list[Epoch]:
        return [Epoch(**line) for line in self._lines() if "command" not in line]

    def rewind(self, progress: Progress) -> None:
        """Drop the epochs that will be learned again."""
        kept = [line for line in self._lines() if "command" in line or Epoch(**line).kept_by(progress)]
        if self._path.exists():
            replace_file(self._path, "".join(map(_line, kept)).encode())

    def command(self, words: Sequence[str]) -> None:
        self._append({"command": [without_secrets(word) for word in words]})

    def epoch(self, epoch: Epoch) -> None:
        self._append(asdict(epoch))

    def _append(self, content: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(_line(content))
            file.flush()
            os.fsync(file.fileno())

    def _lines(self) -> list[dict[str, Any]]:
        """All lines that are complete."""
        try:
            text = self._path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def without_places(command: Sequence[str]) -> str:
    """A command for others to repeat: the places on this machine are replaced by what they are."""
    shown: list[str] = []
    place: str | None = None
    for number, word in enumerate(command):
        option, sign, value = word.partition("=")
        if place is not None:
            word, place = place, None
        elif word in _PLACES:
            place = _PLACES[word]
        elif sign and option in _PLACES:
            word = f"{option}={_PLACES[option]}"
        elif number == 2 and command[1] == "learn-unknowns" and not word.startswith("-"):
            word = "RUN"
        elif (sign and value.startswith("onnx:")) or word.startswith("onnx:"):
            word = f"{option}{sign}onnx:FILE" if sign else "onnx:FILE"
        shown.append(word)
    return shlex.join(shown)


def without_secrets(word: str) -> str:
    """A word of a command with passwords in URLs replaced."""
    for pattern, shown in _SECRETS.items():
        word = pattern.sub(shown, word)
    return word


def _line(content: dict[str, Any]) -> str:
    return json.dumps(content) + "\n"
