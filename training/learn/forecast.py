"""What a run with a trunk will do and take: printed before it begins, from measurements on a few images."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from serving.bundle.providers import CPU
from training.data.class_folders import TEST_FOLDERS, entries, subfolders
from training.data.encoder import Encoder
from training.data.originals import FileOriginal
from training.learn.pooled_fit import SOLVES, projection_for
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


def announce(encoder: Encoder, reporter: Reporter, folders: Sequence[str], tasks: int, stored: int = 0) -> None:
    """Print what will be done, the expected time, memory and disk, and show the progress of the whole run.

    `folders` hold the images; `stored` more are in a quarantine.
    """
    photos = [photo for folder in folders for photo in photo_files(Path(folder))]
    some = [photos[place] for place in np.linspace(0, len(photos) - 1, SAMPLED).astype(int)] if photos else []
    each = encoder.seconds_per_image(some)
    missing = encoder.missing(photos) + stored
    length = projection_for(encoder.spec.dim).length
    per_task = SOLVES * seconds_to_solve(length)
    phases = {"encoding": each * missing, **{f"task {task}": per_task for task in range(tasks)}}
    phases[MEASURING] = 0.1 * per_task
    vectors, matrix = 4 * encoder.spec.dim * (len(photos) + stored), 8 * length**2
    device = "the CPU" if encoder.provider == CPU else encoder.provider
    spec = encoder.spec
    reporter.print(
        f"{len(photos) + stored} photos: {spec.name} encodes each once at {spec.size}x{spec.size} pixels on {device} "
        f"({1000 * each:.0f} ms each; {missing} are not in the cache yet), then the statistics of {tasks} "
        f"{'task' if tasks == 1 else 'tasks'} are computed"
    )
    reporter.print(
        f"expected: {duration(sum(phases.values()))} in total ({duration(phases['encoding'])} to encode, "
        f"{duration(per_task)} per task), {(BASE_MEMORY + COPIES * matrix) / 1e9:.1f} GB of memory, "
        f"{vectors / 1e6:.0f} MB for vectors in {encoder.folder}, {matrix / 1e6:.0f} MB for the run"
    )
    reporter.expect(phases)


def duration(seconds: float) -> str:
    """Such as "about 40 s" or "about 3 min"."""
    return f"about {max(seconds, 1):.0f} s" if seconds < 90 else f"about {seconds / 60:.0f} min"


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
        return []  # reading it says so
    taught = root / "train"
    tested = next((root / name for name in TEST_FOLDERS if (root / name).is_dir()), None)
    roots = [taught, *([tested] if tested else [])] if taught.is_dir() else [root]
    folders = [folder for each in roots for folder in subfolders(each)]
    return [FileOriginal(file) for folder in folders for file in entries(folder) if file.is_file()]
