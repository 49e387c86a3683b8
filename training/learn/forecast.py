"""What a run with a trunk will do and take: printed before it begins, from measurements on a few images."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from serving.bundle.pooled.cholesky import Triangle
from serving.bundle.pooled.classifier_choice import RIDGES
from serving.bundle.pooled.factors import MOST_KEPT
from serving.bundle.pooled.learning import SOLVES, projection_for
from serving.bundle.pooled.left_out import MOST
from serving.bundle.pooled.projection import Projection
from serving.bundle.providers import CPU
from serving.bundle.terminal import duration
from training.config import Preset
from training.data.class_folders import TEST_FOLDERS, entries, subfolders
from training.data.encoder import Encoder
from training.data.images import TEST_SHARE, Source
from training.data.originals import FileOriginal, Original
from training.learn.adapters.adapter_forecast import AdapterForecast, forecast_adapters
from training.show.console import Reporter

MEASURING = "measuring"
SAMPLED = 5
"""Images that are encoded to measure how long it takes."""
TRIAL = 1024
"""Rows of the matrix that is factorised to measure how long others take."""
EXPANDED_SOLVES = sum(expanded for expanded, _ in RIDGES)
"""Of the systems of equations per task, those of expanded vectors; the others are of the vectors as they are."""
TRUNK_FIRST = "filters are learned from those of the first task, "
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


class Photos(NamedTuple):
    """The images of a run, before any of them is read."""

    originals: Sequence[Original]
    taught: int
    """About how many images are learned from."""
    stored: int = 0
    """Images in a quarantine."""

    @property
    def number(self) -> int:
        return len(self.originals) + self.stored

    @classmethod
    def inside(cls, folders: Sequence[str], stored: int = 0) -> Photos:
        """Those of folders of class folders, and `stored` more in a quarantine."""
        found = [photo_files(Path(folder)) for folder in folders]
        shares = [taught_share(Path(folder)) * len(each) for folder, each in zip(folders, found, strict=True)]
        return cls([photo for each in found for photo in each], round(sum(shares)) + stored, stored)


def announce(
    encoder: Encoder, reporter: Reporter, photos: Photos, expected: Expected, before: Mapping[str, float] | None = None
) -> None:
    """Print what will be done, the expected time, memory and disk, and show the progress of the whole run.

    `before` are phases before the photos are encoded, and their seconds: what it takes to learn the trunk, which
    `encoder` then stands in for.
    """
    originals = photos.originals
    some = [originals[place] for place in np.linspace(0, len(originals) - 1, SAMPLED).astype(int)] if originals else []
    each = encoder.seconds_per_image(some)
    missing = photos.number if before else encoder.missing(originals) + photos.stored
    # An estimate: in a run with added tasks, the first task has determined the projection.
    projection = projection_for(encoder.spec.dim, photos.taught / max(expected.classes, 1))
    length, tasks = projection.length, expected.tasks
    per_task = seconds_to_learn(projection, photos.taught // max(tasks, 1))
    phases = {**(before or {}), "encoding": each * missing}
    adapters = None
    if not expected.quick:
        adapters = forecast_adapters(encoder, originals, photos.taught, expected.numbers, expected.classes, each,
                                     expected.preset, expected.seed)  # fmt: skip
        phases |= adapters.phases
    phases |= {f"task {task} (": per_task for task in expected.numbers}
    phases[MEASURING] = 0.1 * per_task
    # Every photo adds a row to the factor of its class, which a checkpoint copies.
    factors = min(4 * length * photos.number, MOST_KEPT)
    vectors, matrix = photos.number + (adapters.vectors if adapters else 0), 8 * length**2
    device = "the CPU" if encoder.provider == CPU else encoder.provider
    spec = encoder.spec
    of_tasks = f"{tasks} {'task' if tasks == 1 else 'tasks'}"
    first = "" if before is None else TRUNK_FIRST
    reporter.print(
        f"{photos.number} photos: {first}{spec.public_name} encodes each once at {spec.size}x{spec.size} pixels on "
        f"{device} ({1000 * each:.0f} ms each; {missing} are not in the cache yet), then {_steps(adapters)}the "
        f"statistics of {of_tasks} are computed"
    )
    reporter.print(
        f"expected: about {duration(sum(phases.values()))} in total ({_of_trunk(before)}"
        f"about {duration(phases['encoding'])} to encode, "
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


def _of_trunk(before: Mapping[str, float] | None) -> str:
    return "" if before is None else f"about {duration(sum(before.values()))} to learn the filters of the trunk, "


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


def seconds_to_learn(projection: Projection, images: int) -> float:
    """How long the statistics of a task with so many images take here: measured on a smaller system of equations."""
    matrix = TRIAL * np.eye(TRIAL) + 1
    trials = []
    for _ in range(3):
        started = time.perf_counter()
        Triangle.of(matrix)
        trials.append(time.perf_counter() - started)
    return multiplications(projection, images) / (TRIAL**3 / 3) * min(trials)


def multiplications(projection: Projection, images: int) -> float:
    """The number of multiplications to factorise the matrices of a task, and to solve them for its images."""
    solves = ((projection.dim, SOLVES - EXPANDED_SOLVES), (projection.length, EXPANDED_SOLVES))
    rows = min(images, MOST)
    return sum(count * (length**3 / 3 + rows * length**2) for length, count in solves)


def listed(source: Source) -> Photos:
    """The images of a source that were found and not read."""
    parts = [source.train, source.test, *([] if source.validation is None else [source.validation])]
    originals = [original for part in parts for original in (() if part.originals is None else part.originals)]
    return Photos(originals, len(originals) - len(source.test))


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
