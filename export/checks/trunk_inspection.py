"""The size and speed of a bundle with a trunk."""

from __future__ import annotations

from functools import partial

import numpy as np
from rich.console import Console
from rich.table import Table

from serving.bundle.layout import POOLED, trunk_name
from serving.bundle.manifest import INPUT_NAME, Bundle
from serving.bundle.model import BundleModel, fastest_seconds
from training.show.console import numbers

RUNS, SECONDS = range(5, 200), 2.0


def print_trunk_inspection(bundle: Bundle) -> None:
    """Print the tasks of a bundle, its files, and the latency of one image: in the trunk alone, and of the answer."""
    manifest, console = bundle.manifest, Console(highlight=False)
    assert manifest.trunk is not None
    size = sum(info.size for info in manifest.files.values())
    console.print(f"{manifest.name} version {manifest.version}, {manifest.created}, {size / 1e6:.2f} MB")
    console.print("replaces no other version" if manifest.before is None else f"replaces version {manifest.before}")
    trunk = manifest.trunk
    console.print(
        f"trunk {trunk.name}, {trunk.size}x{trunk.size} pixels to {trunk.dim} numbers, weights {trunk.sha256[:12]}; "
        "it runs once per image for all tasks"
    )
    table = Table("task", "classes", *numbers("own images", "unchanged"), title="tasks", title_justify="left")
    for task in manifest.tasks:
        more = ", ..." if len(task.labels) > 6 else ""
        cells = ", ".join(task.labels[:6]) + more, str(task.own_images), "yes" if task.unchanged else "no"
        table.add_row(str(task.task), *cells)
    console.print(table)
    times = {precision: latencies(bundle, precision) for precision in manifest.precisions}
    title = "size, and latency of one image on the CPU of this machine"
    costs = Table("part", *numbers("kB", "ms"), title=title, title_justify="left")
    for precision, (bare, _) in times.items():
        name = trunk_name(precision)
        costs.add_row(name, f"{manifest.files[name].size / 1e3:.1f}", f"{1e3 * bare:.2f}")
    costs.add_row(POOLED, f"{manifest.files[POOLED].size / 1e3:.1f}", "")
    for task in manifest.tasks:
        stored = sum(manifest.files[name].size for name in task.parts)
        costs.add_row(f"files of task {task.task}", f"{stored / 1e3:.1f}", "")
    bare, whole = times["fp32"]
    costs.add_row("all but the trunk", "", f"{1e3 * (whole - bare):.2f}")
    costs.add_row("all, in fp32", f"{size / 1e3:.1f}", f"{1e3 * whole:.2f}")
    console.print(costs)
    for precision, checked in manifest.verification.items():
        checks = Table("what", *numbers(precision), title="verified when it was written", title_justify="left")
        for name, value in checked.items():
            checks.add_row(name.replace("_", " "), f"{value:.4g}")
        console.print(checks)


def latencies(bundle: Bundle, precision: str) -> tuple[float, float]:
    """Seconds for one image: of the trunk alone, and of the whole answer; the fastest of several runs in turn."""
    model = BundleModel.load(bundle.path, provider="cpu", precision=precision)
    one = np.ascontiguousarray(bundle.golden.pixels[:1])
    model.predict(one)
    bare = partial(model.session.run, None, {INPUT_NAME: one})
    fastest, whole = fastest_seconds([bare, partial(model.predict, one)], RUNS, SECONDS)
    return fastest, whole
