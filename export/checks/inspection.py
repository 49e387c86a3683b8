"""The size and speed of a bundle, task by task."""

import math
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import shape_inference
from rich.console import Console
from rich.table import Table

from export.checks.parity import IMAGES_OF_TASK
from export.graph.cascade import WORTH_IT, views
from export.graph.session import load_nodes, open_subgraph
from export.graph.writer import SHARED
from models.config import ROTATIONS
from models.detectors import SCORES
from serving.bundle.layout import graph_name, part_name
from serving.bundle.manifest import INPUT_NAME, Bundle, Manifest
from serving.bundle.model import BundleModel
from training.show.console import numbers

WARM_UP, RUNS = 3, 15


@dataclass(frozen=True)
class TaskCost:
    """The share of one task in a bundle: bytes (common to all precisions under None) and milliseconds by precision."""

    labels: tuple[str, ...]
    units: tuple[int, ...]
    macs: int
    """For one image in all its rotations."""
    stored_bytes: dict[str | None, int]
    detector_bytes: int
    """The part of them that its unknown scores take, in all rotations."""
    milliseconds: dict[str, float]
    unchanged: bool


class Inspection(NamedTuple):
    """The costs of every task, and the milliseconds that one image takes in all of them, by precision."""

    tasks: list[TaskCost]
    milliseconds: dict[str, float]
    rotations: int
    """The number of rotations in which a task sees an image."""


class _Layer(NamedTuple):
    """A convolution or a linear layer of one task, on one view of an image."""

    units: int
    macs: int
    aligns: bool
    """Whether it only selects channels, for a residual sum."""


def inspect(bundle: Bundle) -> Inspection:
    """Measure a bundle; latencies are medians for one image on the CPU of this machine."""
    manifest, one = bundle.manifest, np.ascontiguousarray(bundle.golden.pixels[:1])
    latencies = {}
    alone: dict[str, list[float]] = {}
    for precision in manifest.precisions:
        latencies[precision] = _latency(BundleModel.load(bundle.path, provider="cpu", precision=precision).session, one)
        nodes = load_nodes(bundle.path, precision)
        alone[precision] = [_task_latency(bundle, nodes, task, one) for task in range(len(manifest.tasks))]
    # All precisions have the same layers.
    nodes = load_nodes(bundle.path, manifest.precisions[0])
    nodes.graph.input[0].type.tensor_type.shape.dim[0].dim_value = len(one)
    nodes = shape_inference.infer_shapes(nodes, data_prop=True)
    rotations = ROTATIONS if any(node.name.startswith("pixels/turned") for node in nodes.graph.node) else 1
    costs = []
    for task, info in enumerate(manifest.tasks):
        layers = list(_layers(nodes, task))
        owned = {key: manifest.files.get(part_name(f"task{task}", key)) for key in (None, *manifest.precisions)}
        cost = TaskCost(
            labels=info.labels,
            units=tuple(layer.units for layer in layers if not layer.aligns),
            macs=rotations * sum(layer.macs for layer in layers),
            stored_bytes={key: file.size if file else 0 for key, file in owned.items()},
            detector_bytes=_detector_bytes(nodes, task),
            milliseconds={key: each[task] for key, each in alone.items()},
            unchanged=info.unchanged,
        )
        costs.append(cost)
    return Inspection(costs, latencies, rotations)


def _layers(model: onnx.ModelProto, task: int) -> Iterator[_Layer]:
    """The layers of a task's body, from a graph with the shapes of all its tensors for one image."""
    shapes = {
        value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in model.graph.value_info
    }
    shapes |= {constant.name: list(constant.dims) for constant in model.graph.initializer}
    # With a cascade, a branch holds the layers a second time, for the other rotations; it is not counted.
    for node in model.graph.node:
        if node.op_type in ("Conv", "Gemm") and node.name.startswith(f"task{task}/body/"):
            weight, made = shapes[node.input[1]], shapes[node.output[0]]
            aligns = f"{node.name.removesuffix('/Conv')}/index" in shapes
            yield _Layer(weight[0], math.prod(made[2:]) * math.prod(weight), aligns)


def _detector_bytes(model: onnx.ModelProto, task: int) -> int:
    """The bytes of the constants of a task that belong to an unknown score, or to the features for a quarantine."""
    owners = {*SCORES, "features"}
    found = 0
    for constant in model.graph.initializer:
        owner, *parts = constant.name.split("/")
        if owner == f"task{task}" and owners & set(parts):
            found += math.prod(constant.dims) * onnx.helper.tensor_dtype_to_np_dtype(constant.data_type).itemsize
    return found


def _task_latency(bundle: Bundle, model: onnx.ModelProto, task: int, one: NDArray[np.uint8]) -> float:
    """The latency of one image, in all its rotations, in the sub-network of one task."""
    if bundle.manifest.cascade.candidates is None:
        own, pixels = f"task{task}", one
    else:
        # This part sees upright images only; four of them are as much work as four rotations of one.
        own, pixels = f"task{task}/upright", one.repeat(ROTATIONS, axis=0)
    outputs = [f"{own}/logits/Add", f"{own}/distances/Add"]
    return _latency(open_subgraph(bundle.path, model, {INPUT_NAME: onnx.TensorProto.UINT8}, outputs), pixels)


def _latency(session: ort.InferenceSession, pixels: NDArray[np.uint8]) -> float:
    seconds = []
    for number in range(WARM_UP + RUNS):
        started = time.perf_counter()
        session.run(None, {INPUT_NAME: pixels})
        if number >= WARM_UP:
            seconds.append(time.perf_counter() - started)
    return 1000 * statistics.median(seconds)


def print_inspection(bundle: Bundle, found: Inspection) -> None:
    """Print the tasks, the costs and the verification results of a bundle."""
    manifest, console = bundle.manifest, Console(highlight=False)
    size = sum(info.size for info in manifest.files.values())
    console.print(f"{manifest.name} version {manifest.version}, {manifest.created}, {size / 1e6:.2f} MB")
    if manifest.before is None:
        console.print("replaces no other version")
    else:
        unchanged = f"{sum(task.unchanged for task in manifest.tasks)} of {len(manifest.tasks)}"
        console.print(f"replaces version {manifest.before}: {unchanged} tasks are unchanged")
    console.print(cascade_summary(manifest, found.rotations))
    console.print(detector_summary(bundle, found.tasks))
    console.print(_tasks(found.tasks))
    console.print(_costs(manifest, found))
    console.print(_verification(manifest))


def detector_summary(bundle: Bundle, costs: list[TaskCost]) -> str:
    """What is stored about the images of the tasks instead of the images."""
    detectors, own = sum(each.detector_bytes for each in costs), sum(task.images for task in bundle.rule.tasks)
    image = bundle.manifest.image
    return (
        f"no training image is stored; detectors take {_kilobytes(detectors)} kB, as much as "
        f"{detectors / math.prod(image.shape):,.0f} images of {image.height} x {image.width} pixels; "
        f"rule.json has the scores of {own} images"
    )


def cascade_summary(manifest: Manifest, rotations: int) -> str:
    """Which tasks see which rotations, and how many answers that changes."""
    cascade, tasks = manifest.cascade, len(manifest.tasks)
    if rotations == 1:
        text = f"no rotations were learned: every task sees an image upright, {tasks} views"
    elif cascade.candidates is None:
        text = f"no cascade: every task sees an image in all rotations, {ROTATIONS * tasks} views"
    else:
        seen = cascade.candidates if cascade.seen is None else cascade.seen
        text = (
            f"cascade: at most {cascade.candidates} of {tasks} tasks see an image in all rotations, "
            f"{seen:.3g} on average: {views(tasks, seen):.3g} views instead of {ROTATIONS * tasks}"
        )
    if cascade.agreement is None:
        return text
    answered = f"{cascade.agreement:.2%} of {cascade.images} validation images"
    if cascade.candidates is None and cascade.seen is not None:
        left = views(tasks, cascade.seen)
        return (
            f"{text}; the best cascade was not used: it would leave {left:.3g} of them, "
            f"and a cascade must leave at most {WORTH_IT:.0%}"
        )
    if cascade.candidates is None:
        return f"{text}; the best cascade was not used: it would answer {answered} as the full evaluation does"
    return f"{text}; {answered} are answered as without it"


def _tasks(costs: list[TaskCost]) -> Table:
    columns = numbers("M MACs per image", "kB of detectors", "unchanged")
    table = Table("task", "classes", "live units per layer", *columns, title="tasks", title_justify="left")
    for number, part in enumerate(costs):
        table.add_row(
            str(number),
            ", ".join(part.labels[:6]) + (", ..." if len(part.labels) > 6 else ""),
            " ".join(map(str, part.units)),
            f"{part.macs / 1e6:.2f}",
            _kilobytes(part.detector_bytes),
            "yes" if part.unchanged else "no",
        )
    return table


def _costs(manifest: Manifest, found: Inspection) -> Table:
    """Stored bytes, and the latency of one image: in each task alone, and in all of them with the decision."""
    precisions, files = manifest.precisions, manifest.files
    columns = ["kB in common", *(f"{unit} {precision}" for unit in ("kB", "ms") for precision in precisions)]
    title = "size, and latency of one image on the CPU of this machine"
    table = Table("part", *numbers(*columns), title=title, title_justify="left")
    blank = [""] * len(precisions)
    for number, part in enumerate(found.tasks):
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
    table = Table("what", *numbers(*manifest.precisions), title="verified when it was written", title_justify="left")
    checked = manifest.verification
    names = dict.fromkeys(name for values in checked.values() for name in values)
    for name in names:
        if not name.startswith(IMAGES_OF_TASK):
            values = [checked.get(precision, {}).get(name) for precision in manifest.precisions]
            table.add_row(name.replace("_", " "), *("" if value is None else f"{value:.4g}" for value in values))
    table.add_row("tasks with images", *(_covered(checked.get(precision, {})) for precision in manifest.precisions))
    return table


def _covered(checked: Mapping[str, float]) -> str:
    """How many tasks had validation images for the verification, such as "3 of 4"."""
    images = [count for name, count in checked.items() if name.startswith(IMAGES_OF_TASK)]
    return f"{sum(count > 0 for count in images)} of {len(images)}" if images else ""
