"""One ONNX graph for a whole network: 8-bit pixels in, what a decision reads out.

The graph is written layer by layer from the baked modules, not traced: it is the same to the byte each time, its nodes
bear the names of tasks and layers, and ternary weights stay bits until onnxruntime unpacks them when it loads. Tasks
are baked one at a time, as they are written, so that a network of many tasks needs the memory of one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from onnx import TensorProto, helper

from export.bake import BakedTask
from export.layers import Body, FloatBody
from export.quantized import QuantizedBody
from export.writer import Branch, GraphWriter
from models.heads import ROTATIONS
from serving.bundle import INPUT_NAME, ImageSpec, graph_name
from serving.decision import FEATURES, OUTPUT_NAMES, SCORES, Rule

LAST = int(np.iinfo(np.int64).min)
"""Where a slice that runs backwards ends when it takes everything."""
NEVER = 1e30
"""Stands in a table where a task has fewer classes than another."""


@dataclass(frozen=True)
class GraphPlan:
    """What a graph is made for."""

    image: ImageSpec
    mean: float
    std: float
    rule: Rule
    precision: str
    candidates: int | None
    """How many tasks see the rotated images; None: all of them."""
    metadata: dict[str, str]
    rotations: int = ROTATIONS
    """How many rotations of an image the network sees."""


class _Said(NamedTuple):
    """One task's part of the graph."""

    logits: str
    distances: str
    features: str


def write_graph(folder: Path, bake: Callable[[int], BakedTask], plan: GraphPlan) -> None:
    """Write model.PRECISION.onnx and the files of its weights into a folder; `bake` gives a task's sub-network."""
    writer = GraphWriter(folder, plan.precision)
    body = _body(writer, plan)
    images = body.pixels(INPUT_NAME)
    if plan.candidates is None:
        if plan.rotations == ROTATIONS:
            images = writer.add("Concat", "pixels/rotations", [images, *_turned(writer, images)], axis=0)
        said = [_task(writer, body, f"task{task}", bake(task), images) for task in range(len(plan.rule.tasks))]
    else:
        said = _cascade(writer, body, bake, images, plan)
    for name, parts in zip((*OUTPUT_NAMES[:2], FEATURES), zip(*said, strict=True), strict=True):
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


def _turned(writer: GraphWriter, images: str) -> list[str]:
    """The images by 90, 180 and 270 degrees."""
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


def _task(writer: GraphWriter, body: Body, path: str, task: BakedTask, turned: str) -> _Said:
    """All that a task says of images that it sees in all rotations."""
    features = _features(writer, body, path, task, turned, len(task.head.weight))
    first = writer.constant("first_axis", [0])
    scored, squared, white = _rotation_outputs(writer, path, task, features)
    logits = writer.add("ReduceMean", f"{path}/head/ensemble", [scored, first], keepdims=0)
    distances = writer.add("ReduceMean", f"{path}/distance/mean", [squared, first], keepdims=0)
    upright = writer.add("Gather", f"{path}/distance/upright", [white, writer.constant("upright", np.array(0))], axis=0)
    return _Said(logits, distances, upright)


def _features(writer: GraphWriter, body: Body, path: str, task: BakedTask, images: str, rotations: int) -> str:
    """[rotations * n, ...] images -> [rotations, n, live features]."""
    if isinstance(body, QuantizedBody):
        body.ranges(f"{path}/body", task.ranges.of(task.body))
    flat = body.features(f"{path}/body", task.body, images)
    shape = writer.constant(f"{path}/features/shape{rotations}", [rotations, -1, task.head.weight.shape[1]])
    return writer.add("Reshape", f"{path}/features", [flat, shape])


def _rotation_outputs(
    writer: GraphWriter, path: str, task: BakedTask, features: str, rotations: slice = slice(None)
) -> tuple[str, str, str]:
    """Logits and squared distances [rotations, n, classes], standardised features [rotations, n, live features]."""

    def part(name: str) -> str:
        """The rotations in question of a constant that holds all four."""
        if rotations == slice(None):
            return name
        ends = [[rotations.start], [rotations.stop], [0]]
        names = [writer.constant(f"rotation_{number}", [number]) for (number,) in ends]
        return writer.add_constant("Slice", f"{name}/{rotations.start}", [name, *names])

    head, distance = task.head, task.distance
    weight = part(writer.constant(f"{path}/head/weight", head.weight * head.scale))
    bias = part(writer.constant(f"{path}/head/bias", head.bias * head.scale + head.shift))
    scored = writer.add("MatMul", f"{path}/head/score", [features, weight])
    scored = writer.add("Add", f"{path}/head/biased", [scored, bias])

    last = writer.constant("last_axis", [-1])
    length = writer.add("ReduceL2", f"{path}/distance/length", [features, last], keepdims=1)
    length = writer.add("Max", f"{path}/distance/length", [length, writer.constant("tiny", 1e-12)])
    direction = writer.add("Div", f"{path}/distance/direction", [features, length])
    basis = writer.constant(f"{path}/distance/basis", distance.basis)
    gained = writer.add_constant("Mul", f"{path}/distance/gained", [basis, _gain(writer, path, task)])
    back = writer.add_constant("Transpose", f"{path}/distance/back", [gained], perm=[0, 2, 1])
    along = writer.add("MatMul", f"{path}/distance/along", [direction, part(basis)])
    correction = writer.add("MatMul", f"{path}/distance/correction", [along, part(back)])
    level = part(writer.constant(f"{path}/distance/level", distance.level))
    levelled = writer.add("Mul", f"{path}/distance/levelled", [direction, level])
    white = writer.add("Add", f"{path}/distance/white", [levelled, correction])
    rows = writer.add("Unsqueeze", f"{path}/distance/rows", [white, writer.constant("class_axis", [2])])
    means = part(writer.constant(f"{path}/distance/means", distance.means[:, None]))
    difference = writer.add("Sub", f"{path}/distance/difference", [rows, means])
    squared = writer.add("ReduceSumSquare", f"{path}/distance/squared", [difference, last], keepdims=0)
    return scored, squared, white


def _gain(writer: GraphWriter, path: str, task: BakedTask) -> str:
    return writer.constant(f"{path}/distance/gain", task.distance.gain)


def _cascade(
    writer: GraphWriter, body: Body, bake: Callable[[int], BakedTask], images: str, plan: GraphPlan
) -> list[_Said]:
    """All tasks see the upright images; of each image, only the tasks that may still win see the rotated ones.

    A task that may not keeps what it said of the upright image. Every row is treated alone: which tasks see an image
    again does not depend on the other images of the batch.
    """
    quick = [_upright(writer, body, f"task{task}", bake(task), images) for task in range(len(plan.rule.tasks))]
    distances = writer.add("Concat", "cascade/distances", [said.distances for said in quick], axis=1)
    logits = writer.add("Concat", "cascade/logits", [said.logits for said in quick], axis=1)
    _, foreign = _foreignness(writer, "cascade", plan.rule, logits, distances)
    chances = writer.constant("candidates", [plan.candidates or 0])
    best = writer.add_many("TopK", "cascade/best", [foreign, chances], 2, axis=1, largest=0, sorted=1)[0]
    last = writer.add("Gather", "cascade/last", [best, writer.constant("last", [-1])], axis=1)
    again = writer.add("LessOrEqual", "cascade/again", [foreign, last])
    turned = _turned(writer, images)
    return [_again(writer, body, f"task{task}", bake(task), turned, said, again) for task, said in enumerate(quick)]


def _upright(writer: GraphWriter, body: Body, path: str, task: BakedTask, images: str) -> _Said:
    features = _features(writer, body, path, task, images, 1)
    outputs = _rotation_outputs(writer, path, task, features, slice(0, 1))
    first = writer.constant("first_axis", [0])
    return _Said(*[writer.add("Squeeze", f"{path}/upright/{n}", [name, first]) for n, name in enumerate(outputs)])


def _again(
    writer: GraphWriter, body: Body, path: str, task: BakedTask, turned: list[str], said: _Said, again: str
) -> _Said:
    """The rows that are to be seen again in three more rotations: their means over all four replace the first ones."""
    number = writer.constant(f"{path}/number", np.array(int(path.removeprefix("task"))))
    chosen = writer.add("Gather", f"{path}/again/chosen", [again, number], axis=1)
    counted = writer.add("Cast", f"{path}/again/counted", [chosen], to=TensorProto.FLOAT)
    most = writer.add("ReduceMax", f"{path}/again/most", [counted], keepdims=0)
    # A branch, because layers on no image at all are not what onnxruntime was made for.
    some = writer.add("Greater", f"{path}/again/some", [most, writer.constant("nothing", 0.0)])
    with writer.branch("turned") as nodes:
        rows = writer.add("NonZero", f"{path}/again/rows", [chosen])
        index = writer.add("Transpose", f"{path}/again/index", [rows], perm=[1, 0])
        flat = writer.add("Reshape", f"{path}/again/flat", [rows, writer.constant("flat", [-1])])
        own = [writer.add("Gather", f"{path}/again/images{n}", [name, flat], axis=0) for n, name in enumerate(turned)]
        joined = writer.add("Concat", f"{path}/again/rotations", own, axis=0)
        features = _features(writer, body, path, task, joined, ROTATIONS - 1)
        scored, squared, _ = _rotation_outputs(writer, path, task, features, slice(1, ROTATIONS))
        first, share = writer.constant("first_axis", [0]), writer.constant("share", 1 / ROTATIONS)
        replaced = []
        for name, earlier, later in (("head", said.logits, scored), ("distance", said.distances, squared)):
            total = writer.add("ReduceSum", f"{path}/{name}/total", [later, first], keepdims=0)
            before = writer.add("Gather", f"{path}/{name}/before", [earlier, flat], axis=0)
            mean = writer.add("Add", f"{path}/{name}/all", [before, total])
            mean = writer.add("Mul", f"{path}/{name}/mean", [mean, share])
            replaced.append(writer.add("ScatterND", f"{path}/{name}/replaced", [earlier, index, mean]))
    with writer.branch("upright") as kept:
        same = [writer.add("Identity", f"{path}/again/{n}", [name]) for n, name in enumerate(said[:2])]
    logits, distances = writer.choose(f"{path}/again", some, Branch(nodes, replaced), Branch(kept, same))
    return _Said(logits, distances, said.features)


def write_decision(writer: GraphWriter, rule: Rule) -> None:
    """From logits and distances to all that a decision reads: the same as serving.decision.complete."""
    scores, foreign = _foreignness(writer, "decision", rule, "logits", "distances")
    writer.add("Identity", "decision/scores", [scores], output="scores")
    sharp = writer.constant("sharpness", -float(SCORES[rule.score].sharpness))
    likely = writer.add("Mul", "decision/likely", [foreign, sharp])
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


def _foreignness(writer: GraphWriter, path: str, rule: Rule, logits: str, distances: str) -> tuple[str, str]:
    """Every task's score [n, tasks], and the same less what is usual for the task."""
    last = writer.constant("last_axis", [-1])
    if rule.score == "mahalanobis":
        table = _table(writer, f"{path}/distances", rule, distances, NEVER)
        nearest = writer.add("ReduceMin", f"{path}/nearest", [table, last], keepdims=0)
        nearest = writer.add("Max", f"{path}/nearest", [nearest, writer.constant("tiny", 1e-12)])
        scores = writer.add("Log", f"{path}/score", [nearest])
    elif rule.score == "max_logit":
        table = _table(writer, f"{path}/largest", rule, logits, -NEVER)
        scores = writer.add("Neg", f"{path}/score", [writer.add("ReduceMax", path, [table, last], keepdims=0)])
    else:
        raise TypeError(f"no ONNX is known for the score {rule.score!r}")
    usual = writer.constant("usual_scores", rule.centers.astype(np.float32))
    return scores, writer.add("Sub", f"{path}/foreign", [scores, usual])


def _table(writer: GraphWriter, path: str, rule: Rule, values: str, filler: float) -> str:
    """[n, classes] -> [n, tasks, most classes of a task], filled up where a task has fewer."""
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
