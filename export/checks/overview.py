"""What a bundle is, on one screen."""

from __future__ import annotations

from functools import partial

import numpy as np
from rich.console import Console
from rich.table import Table

from serving.bundle.manifest import Bundle, Manifest
from serving.bundle.model import BundleModel, fastest_seconds
from training.show.console import numbers

MOST_TASKS, MOST_LABELS = 8, 4
RUNS, SECONDS = range(3, 100), 1.0


def print_overview(bundle: Bundle) -> None:
    """Print classes, verdict, size and speed: at most 24 lines of 80 characters, whatever the bundle is."""
    manifest, console = bundle.manifest, Console(highlight=False)
    size = sum(info.size for info in manifest.files.values())
    console.print(f"{manifest.name} version {manifest.version}, {manifest.created}, {size / 1e6:.2f} MB")
    for line in _facts(manifest):
        console.print(line, overflow="ellipsis", no_wrap=True)
    console.print(_tasks(manifest))
    for precision in manifest.precisions:
        console.print(f"{precision}: {1e3 * seconds_per_image(bundle, precision):.1f} ms per image on this CPU")
    console.print("layers, files, detectors and verification: --verbose")


def _facts(manifest: Manifest) -> list[str]:
    if manifest.before is None:
        history = "replaces no other version"
    else:
        unchanged = f"{sum(task.unchanged for task in manifest.tasks)} of {len(manifest.tasks)}"
        history = f"replaces version {manifest.before}: {unchanged} tasks are unchanged"
    trunk = f", trunk {manifest.trunk.name}" if manifest.trunk else ""
    lessons = f", {len(manifest.lessons)} lessons" if manifest.lessons else ""
    count = f"{len(manifest.labels)} classes in {len(manifest.tasks)} tasks{lessons}"
    return [
        history,
        f"{count}, method {manifest.method}{trunk}, decision {manifest.decision}",
        *(f"{title}: {part.grade}, {part.numbers}" for title, part in manifest.verdict.parts.items()),
    ]


def _tasks(manifest: Manifest) -> Table:
    table = Table("task", "classes", *numbers("own images", "unchanged"))
    for task in manifest.tasks[:MOST_TASKS]:
        more = len(task.labels) - MOST_LABELS
        labels = ", ".join(task.labels[:MOST_LABELS]) + (f" and {more} more" if more > 0 else "")
        shown = labels if len(labels) <= 44 else f"{labels[:41]}..."
        table.add_row(str(task.task), shown, str(task.own_images), "yes" if task.unchanged else "no")
    if (more := len(manifest.tasks) - MOST_TASKS) > 0:
        table.add_row("...", f"and {more} more tasks", "", "")
    return table


def seconds_per_image(bundle: Bundle, precision: str) -> float:
    """The time of a whole answer to one image: the fastest of several runs."""
    model = BundleModel.load(bundle.path, provider="cpu", precision=precision)
    one = np.ascontiguousarray(bundle.golden.pixels[:1])
    model.predict(one)
    (fastest,) = fastest_seconds([partial(model.predict, one)], RUNS, SECONDS)
    return fastest
