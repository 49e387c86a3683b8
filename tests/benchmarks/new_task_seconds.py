"""How long a new task takes on top of a run with a trunk, and what of it:

    python -m tests.benchmarks.new_task_seconds FOLDER --classes 10 --photos 30 [--known 10] [--quick] [--trunk NAME]

FOLDER has one folder per class, or train/ with these. The first classes in alphabetical order are learned as a run; the
next ones are added to it as one task, with an empty cache. A fifth of the photos of each class, by a hash of the file,
is tested on and not learned from, so that many more are taken than --photos.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from models.trunks.cache_settings import FOLDER_VARIABLE
from training import fit
from training.data.class_folders import subfolders
from training.data.images import TEST_SHARE
from training.learn.fitting import fit_plan
from training.learn.plan import make_plan
from training.show.console import Reporter

PARTS = {
    "encoding": "encoding",
    "views of": "further views",
    "adapter of": "adapters",
    "task": "statistics",
    "measuring": "measuring and report",
}
"""How the names of phases begin -> what they are."""


class Timed(Reporter):
    """Adds up how long each part of a run takes."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def counter(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        with self._timed(name), super().counter(name, total) as advance:
            yield advance

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with self._timed(name), super().phase(name):
            yield

    @contextmanager
    def bar(self, name: str, done: int, total: int) -> Iterator[Callable[[float], None]]:
        with self._timed(name), super().bar(name, done, total) as advance:
            yield advance

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        part = next((part for begin, part in PARTS.items() if name.startswith(begin)), "other")
        self.seconds[part] += time.perf_counter() - started


def seconds_of(words: list[str]) -> dict[str, float]:
    """The parts of `openworld fit` with these words, and the total."""
    reporter, started = Timed(), time.perf_counter()
    try:
        plan = make_plan(fit.make_parser().parse(words), reporter)
        fit_plan(plan, reporter, ["openworld", "fit", *words], [], compiling=False)
    finally:
        reporter.end()
    total = time.perf_counter() - started
    shown = {part: reporter.seconds[part] for part in PARTS.values()}
    return {**shown, "other": total - sum(shown.values()), "total": total}


def take(folders: list[Path], photos: int, place: Path) -> Path:
    """Copies of so many photos of each class that about `photos` are learned from."""
    for folder in folders:
        (place / folder.name).mkdir(parents=True)
        files = sorted(path for path in folder.iterdir() if path.is_file())
        for file in files[: round(photos / (1 - TEST_SHARE))]:
            shutil.copy(file, place / folder.name)
    return place


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.new_task_seconds", description=__doc__)
    parser.add_argument("data", type=Path, metavar="FOLDER")
    parser.add_argument("--known", type=int, default=10, help="classes of the run before")
    parser.add_argument("--classes", type=int, default=10, help="classes of the new task")
    parser.add_argument("--photos", type=int, default=30, help="photos of each class that are learned from")
    parser.add_argument("--trunk", default="efficientnet-lite0")
    parser.add_argument("--size", type=int)
    parser.add_argument("--quick", action="store_true")
    chosen = parser.parse_args()
    taught = chosen.data / "train"
    classes = subfolders(taught if taught.is_dir() else chosen.data)
    with tempfile.TemporaryDirectory() as made:
        place = Path(made)
        os.environ[FOLDER_VARIABLE] = str(place / "cache")
        known = take(classes[: chosen.known], chosen.photos, place / "known")
        new = take(classes[chosen.known : chosen.known + chosen.classes], chosen.photos, place / "new")
        words = ["--trunk", chosen.trunk, *(["--size", str(chosen.size)] if chosen.size else [])]
        words += ["--quick"] if chosen.quick else []
        run = ["--out", str(place / "run")]
        seconds_of(["--data", str(known), "--classes-per-task", str(chosen.known), *words, *run])
        labels = ", ".join(f'"{folder.name}"' for folder in subfolders(new))
        found = seconds_of(["--add-task", labels, "--data", str(new), *run])
    print(f"a task of {chosen.classes} classes with about {chosen.photos} photos each, on {chosen.trunk}, seconds:")
    for part, seconds in found.items():
        print(f"  {part:<22}{seconds:7.1f}")


if __name__ == "__main__":
    main()
