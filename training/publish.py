"""From a run to the servers: `python -m export` in a process of its own, and the quarantine is told."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from serving.shelf import Shelf
from training.config import RunConfig
from training.unknowns import QUARANTINE, Address


class PublishError(Exception):
    """The exporter refused; it has said why, and `code` is what it returned."""

    def __init__(self, code: int) -> None:
        super().__init__(f"python -m export ended with {code}")
        self.code = code


def publish(folder: Path, shelf: Path, quarantine: Address | None) -> str:
    """Export a run to a shelf; the version that it has there."""
    command = [sys.executable, "-m", "export", str(folder), "--publish", str(shelf)]
    settings = quarantine.variables() if quarantine else {}
    done = subprocess.run(command, env={**os.environ, **settings}, check=False)
    current = Shelf(shelf).current()
    if done.returncode or current is None:
        raise PublishError(done.returncode or 1)
    return current.name


def mark_learned(config: RunConfig, quarantine: Address, version: str) -> int:
    """Let the quarantine know which of its images the published version has learned; how many that were news for."""
    here = [lesson for lesson in config.lessons if lesson.dataset == QUARANTINE and lesson.data == quarantine.public]
    with quarantine.opened() as store:
        return sum(store.mark_learned(lesson.items, version) for lesson in here)
