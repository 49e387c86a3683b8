"""What a run with a trunk will do and take: printed before it begins, from measurements on a few images."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from serving.bundle.pooled.factors import MOST_KEPT
from serving.bundle.pooled.learning import SOLVES, projection_for
from serving.bundle.providers import CPU
from serving.bundle.terminal import duration
from training.config import Preset
from training.data.class_folders import TEST_FOLDERS, entries, subfolders
from training.data.encoder import Encoder
from training.data.images import TEST_SHARE
from training.data.originals import FileOriginal
from training.learn.adapters.forecast import AdapterForecast, forecast_adapters
from training.show.console import Reporter

MEASURING = "measuring"
SAMPLED = 5
"""Images that are encoded to measure how long it takes."""
TRIAL = 384
"""Rows of the system of equations that is solved to measure how long a larger one takes."""
BASE_MEMORY = 6e8
"""Bytes of the process itself, with its libraries and the trunk."""
COPIES = 4
"""Matrices of the size of the statistics that are in memory at a time."""
COPIES_OF_FACTORS = 3
"""Of what each class adds to them: before and after a task, and in the checkpoint that is written."""


class Expected(NamedTuple):
    """What a run is going to learn."""

    tasks: int
    classes: int
    preset: Preset
    seed: int
    quick: bool
    """Whether no adapters are learned."""
    first: int = 0
    """The number of its first task: how many are learned already."""

    @property
    def numbers(self) -> range:
        """Those of its tasks."""
        return range(self.first, self.first + self.tasks)


def announce(encoder: Encoder, reporter: Reporter, folders: Sequence[str], expected: Expected, stored: int = 0) -> None:
    """Print what will be done, the expected time, memory and disk, and show the progress of the whole run.

    `folders` hold the images; `stored` more are in a quarantine.
    """
    photos = [photo for folder in folders for photo in photo_files(Path(folder))]
    some = [photos[place] for place in np.linspace(0, len(photos) - 1, SAMPLED).astype(int)] if photos else []
    each = encoder.seconds_per_image(some)
    missing = encoder.missing(photos) + stored
    taught = sum(taught_share(Path(folder)) * len(photo_files(Path(folder))) for folder in folders) + stored
    # Of the added tasks of a run, the first task decided; this is an estimate.
    length, tasks = projection_for(encoder.spec.dim, taught / max(expected.classes, 1)).length, expected.tasks
    per_task = SOLVES * seconds_to_solve(length)
    phases = {"encoding": each * missing}
    adapters = None
    if not expected.quick:
        adapters = forecast_adapters(encoder, photos, round(taught), expected.numbers, expected.classes, each,
                                     expected.preset, expected.seed)  # fmt: skip
        phases |= adapters.phases
    phases |= {f"task {task} (": per_task for task in expected.numbers}
    phases[MEASURING] = 0.1 * per_task
    # Every photo adds a row to the factor of its class, which a checkpoint copies.
    factors = min(4 * length * (len(photos) + stored), MOST_KEPT)
    vectors, matrix = len(photos) + stored + (adapters.vectors if adapters else 0), 8 * length**2
    device = "the CPU" if encoder.provider == CPU else encoder.provider
    spec = encoder.spec
    of_tasks = f"{tasks} {'task' if tasks == 1 else 'tasks'}"
    reporter.print(
        f"{len(photos) + stored} photos: {spec.public_name} encodes each once at {spec.size}x{spec.size} pixels on "
        f"{device} ({1000 * each:.0f} ms each; {missing} are not in the cache yet), then {_steps(adapters)}the "
        f"statistics of {of_tasks} are computed"
    )
    reporter.print(
        f"expected: about {duration(sum(phases.values()))} in total (about {duration(phases['encoding'])} to encode, "
        f"{_of_adapters(adapters)}about {duration(per_task)} per task), "
        f"{(BASE_MEMORY + COPIES * matrix + COPIES_OF_FACTORS * factors) / 1e9:.1f} GB of memory, "
        f"{4 * encoder.spec.dim * vectors / 1e6:.0f} MB for vectors in {encoder.folder}, "
        f"{(matrix + 2 * factors) / 1e6:.0f} MB for the run"
    )
    for note in encoder.trunk.notes:
        reporter.print(f"{spec.public_name}: {note}")
    reporter.expect(phases)


def _steps(adapters: AdapterForecast | None) -> str:
    if adapters is None:
        return ""
    return f"training photos in {adapters.views} more views, from which the adapter of each task learns, and "


def _of_adapters(adapters: AdapterForecast | None) -> str:
    if adapters is None:
        return ""
    encoding, learning = duration(adapters.encoding), duration(adapters.seconds - adapters.encoding)
    return f"about {encoding} for more views and about {learning} to learn adapters, which --quick saves, "


def taught_share(root: Path) -> float:
    """About which share of the photos of a folder is learned from."""
    taught = root / "train"
    if not taught.is_dir():
        return 1 - TEST_SHARE
    every, own = len(photo_files(root)), sum(len(entries(folder)) for folder in subfolders(taught))
    return own / max(every, 1)


def seconds_to_solve(rows: int) -> float:
    """How long a system of so many equations takes here; the work grows with the third power."""
    random = np.random.default_rng(0)
    matrix = random.normal(size=(TRIAL, TRIAL))
    trials = []
    for _ in range(3):
        started = time.perf_counter()
        np.linalg.solve(matrix, matrix)
        trials.append(time.perf_counter() - started)
    # Solving for as many right sides as rows is four times the work of factorising alone.
    return min(trials) / 4 * (rows / TRIAL) ** 3


def class_names(root: Path) -> list[str]:
    """The classes of a folder, as its folders are named."""
    taught = root / "train"
    return [folder.name for folder in subfolders(taught if taught.is_dir() else root)]


def photo_files(root: Path) -> list[FileOriginal]:
    """The files in the class folders of a folder, as they will be read."""
    if not root.is_dir():
        return []  # reading it raises the error
    taught = root / "train"
    tested = next((root / name for name in TEST_FOLDERS if (root / name).is_dir()), None)
    roots = [taught, *([tested] if tested else [])] if taught.is_dir() else [root]
    folders = [folder for each in roots for folder in subfolders(each)]
    return [FileOriginal(file) for folder in folders for file in entries(folder) if file.is_file()]
