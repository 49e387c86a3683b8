"""One ONNX graph for a whole network: 8-bit pixels in, the inputs of the decision rule out.

The graph is written layer by layer from the baked modules, not traced. So it is the same to the byte each time, its
nodes are named after tasks and layers, and ternary weights stay bits until onnxruntime unpacks them when it loads the
graph. Tasks are baked one at a time, as they are written, so that exporting many tasks takes the memory of one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from onnx import TensorProto, helper

from export.graph.baked_task import BakedTask
from export.graph.body_float import Body, FloatBody
from export.graph.body_int8 import QuantizedBody
from export.graph.scores import DEPTHS, write_decision_of_task, write_measurements
from export.graph.writer import Branch, GraphWriter
from models.config import ROTATIONS
from serving.bundle.decision import FEATURES, OUTPUT_NAMES, Rule
from serving.bundle.layout import graph_name
from serving.bundle.manifest import INPUT_NAME
from serving.bundle.sections import ImageSpec

LAST = int(np.iinfo(np.int64).min)
"""The end of a slice that runs backwards over a whole axis."""
NEVER = 1e30
"""Fills a table where a task has fewer classes than another."""
UPRIGHT_DISTANCES, AGAIN = "cascade/distances/Concat", "cascade/again/LessOrEqual"
"""Nodes of a cascade: the distances of all tasks for upright images, and which tasks see which image rotated."""


def upright_logits(task: int) -> str:
    """The tensor of a cascade with a task's calibrated logits for upright images."""
    return f"task{task}/upright/logits/Add"


@dataclass(frozen=True)
class GraphPlan:
    """What a graph is written for."""

    image: ImageSpec
    mean: float
    std: float
    rule: Rule
    precision: str
    candidates: int | None
    """The most tasks that see the rotated images; None: all of them."""
    metadata: dict[str, str]
    margin: float | None = None
    """A task whose score exceeds the best one by more than this does not see them; None: no such limit."""
    rotations: int = ROTATIONS
    """The number of rotations of an image that the network sees."""


class _TaskOutputs(NamedTuple):
    """Names of one task's outputs, computed from all rotations that it sees."""

    logits: str
    distances: str
    features: str


def write_graph(folder: Path, bake: Callable[[int], BakedTask], plan: GraphPlan) -> None:
    """Write model.PRECISION.onnx and its weight files into a folder; `bake` returns a task's sub-network."""
    writer = GraphWriter(folder, plan.precision)
    body = _body(writer, plan)
    images = body.pixels(INPUT_NAME)
    if plan.candidates is None:
        if plan.rotations == ROTATIONS:
            images = writer.add("Concat", "pixels/rotations", [images, *_rotated(writer, images)], axis=0)
        outputs = [_task(writer, body, f"task{task}", bake(task), images) for task in range(len(plan.rule.tasks))]
    else:
        outputs = _cascade(writer, body, bake, images, plan)
    for name, parts in zip((*OUTPUT_NAMES[:2], FEATURES), zip(*outputs, strict=True), strict=True):
        writer.add("Concat", f"{name}/join", list(parts), output=name, axis=1)
    write_decision(writer, plan.rule)
    classes, count = len(plan.rule.task_of_class), len(plan.rule.tasks)
    widths: dict[str, int | str] = dict.fromkeys(OUTPUT_NAMES, classes)
    widths |= {"scores": count, "p_task": count, FEATURES: "features"}
    writer.finish(
        folder / graph_name(plan.precision),
        [helper.make_tensor_value_info(INPUT_NAME, TensorProto.UINT8, ["batch", *plan.image.shape])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", width]) for name, width in widths.items()],
        plan.metadata,
    )


def _body(writer: GraphWriter, plan: GraphPlan) -> Body:
    if plan.precision == "int8":
        return QuantizedBody(writer, plan.mean, plan.std)
    return FloatBody(writer, plan.mean, plan.std, half=plan.precision == "fp16")


def _rotated(writer: GraphWriter, images: str) -> list[str]:
    """The images rotated by 90, 180 and 270 degrees."""
    across = writer.add("Transpose", "pixels/across", [images], perm=[0, 1, 3, 2])
    return [
        _flip(writer, "pixels/turned90", across, [2]),
        _flip(writer, "pixels/turned180", images, [2, 3]),
        _flip(writer, "pixels/turned270", across, [3]),
    ]


def _flip(writer: GraphWriter, path: str, images: str, axes: list[int]) -> str:
    back = writer.constant(f"backwards{len(axes)}", [-1] * len(axes))
    ends = writer.constant(f"ends{len(axes)}", [LAST] * len(axes))
    return writer.add("Slice", path, [images, back, ends, writer.constant(f"{path}/axes", axes), back])


def _task(writer: GraphWriter, body: Body, path: str, task: BakedTask, rotated: str) -> _TaskOutputs:
    """A task's outputs for images that it sees in all rotations."""
    measured, features = _measurements(writer, body, path, task, rotated, slice(0, len(task.head.weight)))
    means = {
        name: writer.add("ReduceMean", f"{path}/{name}/mean", [values, writer.constant("first_axis", [0])], keepdims=0)
        for name, values in measured.items()
    }
    return _TaskOutputs(*write_decision_of_task(writer, path, task, means), features)


def _measurements(
    writer: GraphWriter, body: Body, path: str, task: BakedTask, images: str, rotations: slice
) -> tuple[dict[str, str], str]:
    """[rotations * n, ...] images -> measurements [rotations, n, columns], and the standardised features."""
    if isinstance(body, QuantizedBody):
        body.ranges(f"{path}/body", task.ranges.by_layer(task.body))
    flat = body.depths(f"{path}/body", task.body, images, task.tap)
    count = rotations.stop - rotations.start
    features = {}
    for name, values in zip(DEPTHS, flat, strict=True):
        # The number of features is written out, because only one dimension can be inferred: the number of images.
        width = task.head.weight.shape[1] if name == "deep" else task.shallow_features
        shape = writer.constant(f"{path}/{name}/shape{count}", [count, -1, width])
        features[name] = writer.add("Reshape", f"{path}/{name}/rotations", [values, shape])
    return write_measurements(writer, path, task, features, rotations)


def _cascade(
    writer: GraphWriter, body: Body, bake: Callable[[int], BakedTask], images: str, plan: GraphPlan
) -> list[_TaskOutputs]:
    """All tasks see the upright images; only the tasks that may still win see the rotated ones.

    The other tasks keep their outputs for the upright image. Every row is treated alone: which tasks see an image again
    does not depend on the other images of the batch.
    """
    tasks = range(len(plan.rule.tasks))
    quick = [_upright(writer, body, f"task{task}", bake(task), images) for task in tasks]
    distances = writer.add("Concat", "cascade/distances", [outputs.distances for _, outputs in quick], axis=1)
    scores = _nearest(writer, "cascade", plan.rule, distances)
    chances = writer.constant("candidates", [plan.candidates or 0])
    best = writer.add_many("TopK", "cascade/best", [scores, chances], 2, axis=1, largest=0, sorted=1)[0]
    last = writer.add("Gather", "cascade/last", [best, writer.constant("last", [-1])], axis=1)
    if plan.margin is not None:
        first = writer.add("Gather", "cascade/first", [best, writer.constant("first_axis", [0])], axis=1)
        behind = writer.add("Add", "cascade/behind", [first, writer.constant("margin", plan.margin)])
        last = writer.add("Min", "cascade/last", [last, behind])
    again = writer.add("LessOrEqual", "cascade/again", [scores, last])
    # Computed once for all tasks: it is most of the cost of a task that is skipped.
    counted = writer.add("Cast", "cascade/counted", [again], to=TensorProto.FLOAT)
    most = writer.add("ReduceMax", "cascade/most", [counted, writer.constant("first_axis", [0])], keepdims=0)
    some = writer.add("Greater", "cascade/some", [most, writer.constant("nothing", 0.0)])
    rotated = _rotated(writer, images)
    return [_again(writer, body, f"task{task}", bake(task), rotated, *quick[task], again, some) for task in tasks]


def _upright(
    writer: GraphWriter, body: Body, path: str, task: BakedTask, images: str
) -> tuple[dict[str, str], _TaskOutputs]:
    """A task's measurements [n, columns] of upright images, and its outputs for them."""
    measured, features = _measurements(writer, body, path, task, images, slice(0, 1))
    first = writer.constant("first_axis", [0])
    squeezed = {
        name: writer.add("Squeeze", f"{path}/{name}/upright", [value, first]) for name, value in measured.items()
    }
    return squeezed, _TaskOutputs(*write_decision_of_task(writer, f"{path}/upright", task, squeezed), features)


def _again(
    writer: GraphWriter,
    body: Body,
    path: str,
    task: BakedTask,
    rotated: list[str],
    upright: dict[str, str],
    outputs: _TaskOutputs,
    again: str,
    some: str,
) -> _TaskOutputs:
    """Compute the rows that the task sees again in the other three rotations, and replace their outputs."""
    number = writer.constant(f"{path}/number", np.array(int(path.removeprefix("task"))))
    # A branch, because onnxruntime does not handle layers on an empty batch well.
    any_row = writer.add("Gather", f"{path}/again/some", [some, number], axis=0)
    with writer.branch("turned") as nodes:
        chosen = writer.add("Gather", f"{path}/again/chosen", [again, number], axis=1)
        rows = writer.add("NonZero", f"{path}/again/rows", [chosen])
        index = writer.add("Transpose", f"{path}/again/index", [rows], perm=[1, 0])
        flat = writer.add("Reshape", f"{path}/again/flat", [rows, writer.constant("flat", [-1])])
        own = [writer.add("Gather", f"{path}/again/images{n}", [name, flat], axis=0) for n, name in enumerate(rotated)]
        joined = writer.add("Concat", f"{path}/again/rotations", own, axis=0)
        measured, _ = _measurements(writer, body, path, task, joined, slice(1, ROTATIONS))
        first, share = writer.constant("first_axis", [0]), writer.constant("share", 1 / ROTATIONS)
        means = {}
        for name, later in measured.items():
            total = writer.add("ReduceSum", f"{path}/{name}/total", [later, first], keepdims=0)
            before = writer.add("Gather", f"{path}/{name}/before", [upright[name], flat], axis=0)
            mean = writer.add("Add", f"{path}/{name}/all", [before, total])
            means[name] = writer.add("Mul", f"{path}/{name}/mean", [mean, share])
        replacements = write_decision_of_task(writer, path, task, means)
        replaced = [
            writer.add("ScatterND", f"{path}/replaced{n}", [earlier, index, now])
            for n, (earlier, now) in enumerate(zip(outputs[:2], replacements, strict=True))
        ]
    with writer.branch("upright") as kept:
        same = [writer.add("Identity", f"{path}/again/{n}", [name]) for n, name in enumerate(outputs[:2])]
    logits, distances = writer.choose(f"{path}/again", any_row, Branch(nodes, replaced), Branch(kept, same))
    return _TaskOutputs(logits, distances, outputs.features)


def write_decision(writer: GraphWriter, rule: Rule) -> None:
    """From logits and distances to all inputs of the decision rule: the same as serving.bundle.decision.complete."""
    writer.add("Identity", "decision/scores", [_nearest(writer, "decision", rule, "distances")], output="scores")
    likely = writer.add("Neg", "decision/likely", ["scores"])
    writer.add("Softmax", "decision/p_task", [likely], output="p_task", axis=1)
    table = _table(writer, "decision/logits", rule, "logits", -NEVER)
    within = writer.add("Softmax", "decision/within", [table], axis=2)
    columns = writer.add("Unsqueeze", "decision/columns", ["p_task", writer.constant("class_axis", [2])])
    joint = writer.add("Mul", "decision/joint", [within, columns])
    widest = max(task.classes for task in rule.tasks)
    places = [task * widest + place for task, own in enumerate(rule.tasks) for place in range(own.classes)]
    for name, values in (("p_within_task", within), ("probability", joint)):
        rows = writer.add("Flatten", f"decision/{name}", [values], axis=1)
        index = writer.constant("places_of_classes", places)
        writer.add("Gather", f"decision/{name}", [rows, index], output=name, axis=1)


def _nearest(writer: GraphWriter, path: str, rule: Rule, distances: str) -> str:
    """[n, classes] -> [n, tasks]: the score of a task is the distance from its nearest class."""
    table = _table(writer, f"{path}/distances", rule, distances, NEVER)
    return writer.add("ReduceMin", f"{path}/nearest", [table, writer.constant("last_axis", [-1])], keepdims=0)


def _table(writer: GraphWriter, path: str, rule: Rule, values: str, filler: float) -> str:
    """[n, classes] -> [n, tasks, most classes of a task], padded where a task has fewer."""
    widest = max(task.classes for task in rule.tasks)
    sizes = {task.classes for task in rule.tasks}
    if sizes == {widest}:
        shape = writer.constant("table_shape", [-1, len(rule.tasks), widest])
        return writer.add("Reshape", path, [values, shape])
    classes = len(rule.task_of_class)
    own = [[start + place if place < task.classes else classes for place in range(widest)]
           for start, task in zip(rule.starts.tolist(), rule.tasks, strict=True)]  # fmt: skip
    pads = writer.constant("one_column_more", [0, 0, 0, 1])
    padded = writer.add("Pad", path, [values, pads, writer.constant(f"filler{filler:g}", filler)])
    return writer.add("Gather", path, [padded, writer.constant("classes_of_tasks", np.array(own))], axis=1)
