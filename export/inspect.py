"""What a bundle is made of, task by task: `python -m export.inspect BUNDLE`."""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import shape_inference
from rich.console import Console
from rich.table import Table

from export.cascade import WORTH_IT, views
from export.part import load_nodes, open_part
from export.verify import IMAGES_OF_TASK
from export.writer import SHARED
from models.heads import ROTATIONS
from serving.bundle import INPUT_NAME, Bundle, Manifest, load_bundle
from serving.layout import BundleError, graph_name, part_name
from serving.runtime import Model

WARM_UP, RUNS = 3, 15


@dataclass(frozen=True)
class Part:
    """One task's share of a bundle; milliseconds by precision, and bytes, with those of all precisions under None."""

    labels: tuple[str, ...]
    units: tuple[int, ...]
    macs: int
    """For one image in all its rotations."""
    stored_bytes: dict[str | None, int]
    milliseconds: dict[str, float]
    unchanged: bool


class Inspection(NamedTuple):
    """Every task's part, and the milliseconds that one image takes in all of them together, by precision."""

    parts: list[Part]
    milliseconds: dict[str, float]
    rotations: int
    """In how many of them a task sees an image."""


class _Layer(NamedTuple):
    """A convolution or a linear layer of one task, on one view of an image."""

    units: int
    macs: int
    aligns: bool
    """Whether it only picks channels, for a sum."""


def inspect(bundle: Bundle) -> Inspection:
    """Measure a bundle; latencies are medians for one image on this machine's CPU."""
    manifest, one = bundle.manifest, np.ascontiguousarray(bundle.golden.pixels[:1])
    tasks, latencies = range(len(manifest.tasks)), {}
    layers: list[list[_Layer]] = []
    turns = False
    alone: dict[str, list[float]] = {}
    for precision in manifest.precisions:
        model = Model.load(bundle.path, provider="cpu", precision=precision)
        latencies[precision] = _latency(model.session, one)
        del model
        nodes = load_nodes(bundle.path, precision)
        alone[precision] = [_task_latency(bundle, nodes, task, one) for task in tasks]
        if not layers:
            # The layers of one precision are those of all.
            shapes = _with_shapes(nodes)
            layers = [list(_layers(shapes, task)) for task in tasks]
            turns = any(node.name.startswith("pixels/turned") for node in nodes.graph.node)
    rotations = ROTATIONS if turns else 1
    parts = [
        _part(manifest, task, layers[task], rotations, {key: each[task] for key, each in alone.items()})
        for task in tasks
    ]
    return Inspection(parts, latencies, rotations)


def _part(manifest: Manifest, task: int, layers: list[_Layer], rotations: int, milliseconds: dict[str, float]) -> Part:
    info = manifest.tasks[task]
    owned = {key: manifest.files.get(part_name(f"task{task}", key)) for key in (None, *manifest.precisions)}
    return Part(
        labels=info.labels,
        units=tuple(layer.units for layer in layers if not layer.aligns),
        macs=rotations * sum(layer.macs for layer in layers),
        stored_bytes={key: file.size if file else 0 for key, file in owned.items()},
        milliseconds=milliseconds,
        unchanged=info.unchanged,
    )


def _with_shapes(model: onnx.ModelProto) -> onnx.ModelProto:
    """A graph with the shapes of everything in it for one image."""
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1
    return shape_inference.infer_shapes(model, data_prop=True)


def _layers(model: onnx.ModelProto, task: int) -> Iterator[_Layer]:
    shapes = {
        value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in model.graph.value_info
    }
    shapes |= {constant.name: list(constant.dims) for constant in model.graph.initializer}
    # With a cascade, the layers stand a second time in a branch, for the other rotations: those are not looked at.
    for node in model.graph.node:
        if node.op_type in ("Conv", "Gemm") and node.name.startswith(f"task{task}/body/"):
            weight, made = shapes[node.input[1]], shapes[node.output[0]]
            aligns = f"{node.name.removesuffix('/Conv')}/index" in shapes
            yield _Layer(weight[0], math.prod(made[2:]) * math.prod(weight), aligns)


def _task_latency(bundle: Bundle, model: onnx.ModelProto, task: int, one: NDArray[np.uint8]) -> float:
    """What one image takes in all its rotations in a task's sub-network alone."""
    if bundle.manifest.cascade.candidates is None:
        own, pixels = f"task{task}", one
    else:
        # This part sees upright images only; so many of them are as much work as the rotations of one.
        own, pixels = f"task{task}/upright", one.repeat(ROTATIONS, axis=0)
    outputs = [f"{own}/logits/Add", f"{own}/distances/Add"]
    return _latency(open_part(bundle.path, model, {INPUT_NAME: onnx.TensorProto.UINT8}, outputs), pixels)


def _latency(session: ort.InferenceSession, pixels: NDArray[np.uint8]) -> float:
    seconds = []
    for number in range(WARM_UP + RUNS):
        started = time.perf_counter()
        session.run(None, {INPUT_NAME: pixels})
        if number >= WARM_UP:
            seconds.append(time.perf_counter() - started)
    return 1000 * statistics.median(seconds)


def show(bundle: Bundle, found: Inspection) -> None:
    """Print a bundle's tasks, its precisions, and what was verified when it was written."""
    manifest, console = bundle.manifest, Console()
    size = sum(info.size for info in manifest.files.values())
    console.print(
        f"{manifest.name} version {manifest.version}, {manifest.created}, {size / 1e6:.2f} MB", highlight=False
    )
    unchanged = sum(task.unchanged for task in manifest.tasks)
    console.print(
        "goes on from no other version"
        if manifest.before is None
        else f"goes on from version {manifest.before}: {unchanged} of {len(manifest.tasks)} tasks are unchanged",
        highlight=False,
    )
    console.print(cascade_said(manifest, found.rotations), highlight=False)
    console.print(_tasks(found.parts))
    console.print(_costs(manifest, found))
    console.print(_verification(manifest))


def cascade_said(manifest: Manifest, rotations: int) -> str:
    """Who sees what in which rotation, and what that changes."""
    cascade, tasks = manifest.cascade, len(manifest.tasks)
    if rotations == 1:
        said = f"no rotations were taught: every task sees an image upright, {tasks} views"
    elif cascade.candidates is None:
        said = f"no cascade: every task sees an image in all rotations, {ROTATIONS * tasks} views"
    else:
        seen = cascade.candidates if cascade.seen is None else cascade.seen
        said = (
            f"cascade: at most {cascade.candidates} of {tasks} tasks see an image in all rotations, "
            f"{seen:.3g} on average: {views(tasks, seen):.3g} views instead of {ROTATIONS * tasks}"
        )
    if cascade.agreement is None:
        return said
    answered = f"{cascade.agreement:.2%} of {cascade.images} validation images"
    if cascade.candidates is None and cascade.seen is not None:
        left = views(tasks, cascade.seen)
        return (
            f"{said}; the best cascade was not taken: it would leave {left:.3g} of them, "
            f"and more than {WORTH_IT:.0%} are not worth it"
        )
    if cascade.candidates is None:
        return f"{said}; the best cascade was not taken: it would answer {answered} as the full evaluation does"
    return f"{said}; {answered} are answered as without"


def _tasks(parts: list[Part]) -> Table:
    table = _table("tasks", ("task", "classes", "live units a layer"), ("M MACs an image", "unchanged"))
    for number, part in enumerate(parts):
        table.add_row(
            str(number),
            ", ".join(part.labels[:6]) + (", ..." if len(part.labels) > 6 else ""),
            " ".join(map(str, part.units)),
            f"{part.macs / 1e6:.2f}",
            "yes" if part.unchanged else "no",
        )
    return table


def _costs(manifest: Manifest, found: Inspection) -> Table:
    """What is stored, and how long one image takes: in each task alone, and in all of them with the decision."""
    precisions, files = manifest.precisions, manifest.files
    columns = ["kB in common", *(f"{unit} {precision}" for unit in ("kB", "ms") for precision in precisions)]
    table = _table("size, and latency of one image on this machine's CPU", ("part",), columns)
    blank = [""] * len(precisions)
    for number, part in enumerate(found.parts):
        sizes = [_kilobytes(part.stored_bytes[key]) for key in (None, *precisions)]
        table.add_row(f"task {number}", *sizes, *(f"{part.milliseconds[precision]:.2f}" for precision in precisions))
    common = sum(info.size for name, info in files.items() if name.endswith(".bin") and name.count(".") == 1)
    shared = files.get(part_name(SHARED))
    table.add_row("shared weights", _kilobytes(shared.size if shared else 0), *blank, *blank)
    table.add_row("graph", "", *(_kilobytes(files[graph_name(precision)].size) for precision in precisions), *blank)
    every = [sum(info.size for name, info in files.items() if f".{key}." in name) for key in precisions]
    whole = [f"{found.milliseconds[precision]:.2f}" for precision in precisions]
    table.add_row("all", _kilobytes(common), *map(_kilobytes, every), *whole)
    return table


def _kilobytes(size: int) -> str:
    return f"{size / 1e3:.1f}"


def _verification(manifest: Manifest) -> Table:
    table = _table("verified when it was written", ("what",), manifest.precisions)
    checked = manifest.verification
    names = dict.fromkeys(name for values in checked.values() for name in values)
    for name in names:
        if not name.startswith(IMAGES_OF_TASK):
            values = [checked.get(precision, {}).get(name) for precision in manifest.precisions]
            table.add_row(name.replace("_", " "), *("" if value is None else f"{value:.4g}" for value in values))
    table.add_row("tasks with images", *(_covered(checked.get(precision, {})) for precision in manifest.precisions))
    return table


def _covered(checked: Mapping[str, float]) -> str:
    """How many of the tasks had validation images to be verified by, such as "3 of 4"."""
    images = [count for name, count in checked.items() if name.startswith(IMAGES_OF_TASK)]
    return f"{sum(count > 0 for count in images)} of {len(images)}" if images else ""


def _table(title: str, left: Iterable[str], right: Iterable[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in left:
        table.add_column(column)
    for column in right:
        table.add_column(column, justify="right")
    return table


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m export.inspect", description=__doc__)
    parser.add_argument("bundle", type=Path, metavar="BUNDLE")
    chosen = parser.parse_args(arguments)
    try:
        bundle = load_bundle(chosen.bundle)
        show(bundle, inspect(bundle))
    except BundleError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
