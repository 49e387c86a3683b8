"""Runs a written graph: whole, or one task at a time if it is too large for that.

A part of a graph is opened as a graph of its own, which takes only the memory of that part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper
from onnx.external_data_helper import ExternalDataInfo, uses_external_data

from export.graph.assemble import AGAIN, UPRIGHT_DISTANCES, upright_logits
from serving.bundle.decision import FEATURES, NETWORK_NAMES, OUTPUT_NAMES, Outputs
from serving.bundle.layout import graph_name, parts_of
from serving.bundle.manifest import INPUT_NAME, Graph
from serving.bundle.session import open_session

if TYPE_CHECKING:
    import onnxruntime as ort

BATCH_SIZE = 64
LARGE = 250_000_000
"""Graphs with this many weights are run task by task: onnxruntime holds several copies of them while it loads."""

Arrays = dict[str, NDArray[Any]]


class GraphQuery(NamedTuple):
    """Images, and the size of the batches in which a graph gets them."""

    pixels: NDArray[np.uint8]
    size: int = BATCH_SIZE
    all_rotated: bool = False
    """For a cascade: let every task see all images rotated, whichever tasks it would choose."""


class WholeGraph:
    """A graph in one session; queries with `all_rotated` are run task by task."""

    def __init__(self, folder: Path, precision: str) -> None:
        self._session = whole_session(folder, precision)
        self._by_task = partial(GraphByTask, folder, precision)

    def run(self, queries: Sequence[GraphQuery]) -> list[Arrays]:
        return [
            self._by_task().run([query])[0] if query.all_rotated else run_graph(self._session, query.pixels, query.size)
            for query in queries
        ]


class GraphByTask:
    """Every task's part of a graph in a session of its own, one after the other, then the part that joins them.

    In a cascade, a task's part computes its outputs for upright images and for all rotations. The part of the graph
    that chooses the tasks which see an image again then decides which of the two are used.
    """

    def __init__(self, folder: Path, precision: str) -> None:
        self._folder = folder
        self._model = load_nodes(folder, precision)
        made = {node.name: node for node in self._model.graph.node}
        # Logits, distances and features of each task; in a cascade, also logits and distances of upright images alone.
        names = [list(made[f"{name}/join/Concat"].input) for name in (*NETWORK_NAMES, FEATURES)]
        self._cascaded = AGAIN in made
        if self._cascaded:
            names += [[upright_logits(task) for task in range(len(names[0]))]]
            names += [list(made[UPRIGHT_DISTANCES].input)]
        self._tasks = list(zip(*names, strict=True))

    def run(self, queries: Sequence[GraphQuery]) -> list[Arrays]:
        outputs = [self._run_task(names, queries) for names in self._tasks]
        return [
            self._join(parts, chosen=self._cascaded and not query.all_rotated)
            for query, *parts in zip(queries, *outputs, strict=True)
        ]

    def _run_task(self, names: Sequence[str], queries: Sequence[GraphQuery]) -> list[list[NDArray[Any]]]:
        """A task's outputs for every query, in the order of the names."""
        inputs: dict[str, int] = {INPUT_NAME: TensorProto.UINT8}
        if self._cascaded:
            inputs[AGAIN] = TensorProto.BOOL
        session = open_subgraph(self._folder, self._model, inputs, names)
        outputs = []
        for pixels, size, _ in queries:
            all_tasks = np.ones((len(pixels), len(self._tasks)), dtype=bool)
            given = {INPUT_NAME: pixels, AGAIN: all_tasks}
            outputs.append(_batches(session, names, {name: given[name] for name in inputs}, size))
        return [list(each.values()) for each in outputs]

    def _join(self, parts: Sequence[list[NDArray[Any]]], *, chosen: bool) -> Arrays:
        """Run the rest of the graph on the outputs of every task; `chosen`: on those that the cascade chooses."""
        outputs = [dict(zip(names, part, strict=True)) for names, part in zip(self._tasks, parts, strict=True)]
        if chosen:
            upright = {names[4]: part[4] for names, part in zip(self._tasks, parts, strict=True)}
            (again,) = self._run_rest([AGAIN], upright).values()
            for task, (names, part) in enumerate(zip(self._tasks, parts, strict=True)):
                sees = again[:, task : task + 1]
                outputs[task] |= {names[place]: np.where(sees, part[place], part[place + 3]) for place in (0, 1)}
        given = {name: outputs[task][name] for task, names in enumerate(self._tasks) for name in names[:3]}
        return self._run_rest([*OUTPUT_NAMES, FEATURES], given)

    def _run_rest(self, outputs: Sequence[str], given: Mapping[str, NDArray[Any]]) -> Arrays:
        session = open_subgraph(self._folder, self._model, dict.fromkeys(given, TensorProto.FLOAT), outputs)
        return _batches(session, outputs, given, BATCH_SIZE)


GraphRunner = WholeGraph | GraphByTask
"""Its `run` takes all queries at once, since opening its sessions may take longest; returns all outputs for each."""


def open_written(folder: Path, precision: str, *, large: bool | None = None) -> GraphRunner:
    """A runner with bounded memory; `large` overrides the choice by the graph's size."""
    if is_large(load_nodes(folder, precision)) if large is None else large:
        return GraphByTask(folder, precision)
    return WholeGraph(folder, precision)


def is_large(model: onnx.ModelProto) -> bool:
    """Whether a graph should be run task by task."""
    sizes = (math.prod(constant.dims) * (8 if constant.name.endswith("/packed") else 1)
             for constant in model.graph.initializer)  # fmt: skip
    # A cascade has every layer twice: for upright images, and in a branch for rotated ones.
    copies = 2 if any(node.name == AGAIN for node in model.graph.node) else 1
    return bool(copies * sum(sizes) >= LARGE)


def whole_session(folder: Path, precision: str) -> ort.InferenceSession:
    """A whole graph on the CPU, with a server's settings."""
    names = parts_of((path.name for path in folder.iterdir()), precision)
    graph = Graph((folder / graph_name(precision)).read_bytes(), {name: (folder / name).read_bytes() for name in names})
    return open_session(graph)


def run_graph(session: ort.InferenceSession, pixels: NDArray[np.uint8], size: int = BATCH_SIZE) -> Arrays:
    """All outputs of a whole graph, in batches of this size."""
    return _batches(session, [*OUTPUT_NAMES, FEATURES], {INPUT_NAME: pixels}, size)


def _batches(session: ort.InferenceSession, names: Sequence[str], given: Outputs, size: int) -> Arrays:
    count = len(next(iter(given.values())))
    parts = [
        session.run(list(names), {name: values[start : start + size] for name, values in given.items()})
        for start in range(0, count, size)
    ]
    return {name: np.concatenate(column) for name, column in zip(names, zip(*parts, strict=True), strict=True)}


def load_nodes(folder: Path, precision: str) -> onnx.ModelProto:
    """A graph without its weights, which stay in their files."""
    return onnx.load(folder / graph_name(precision), load_external_data=False)


def open_subgraph(
    folder: Path, model: onnx.ModelProto, inputs: Mapping[str, int], outputs: Sequence[str]
) -> ort.InferenceSession:
    """A session, with a server's settings, of the part that leads from some tensors (name -> ONNX type) to others."""
    alone = cut(model, inputs, outputs)
    files = {ExternalDataInfo(tensor).location for tensor in alone.graph.initializer if uses_external_data(tensor)}
    graph = Graph(alone.SerializeToString(), {name: (folder / name).read_bytes() for name in sorted(files)})
    return open_session(graph)


def cut(model: onnx.ModelProto, inputs: Mapping[str, int], outputs: Sequence[str]) -> onnx.ModelProto:
    """The nodes between inputs and outputs, and the constants that they read."""
    makers = {name: node for node in model.graph.node for name in node.output}
    needed: set[str] = set()
    waiting = list(outputs)
    while waiting:
        name = waiting.pop()
        if name in needed or name in inputs:
            continue
        needed.add(name)
        if name in makers:
            waiting += _reads(makers[name])
    graph = helper.make_graph(
        [node for node in model.graph.node if needed.intersection(node.output)],
        "subgraph",
        [helper.make_tensor_value_info(name, kind, None) for name, kind in inputs.items()],
        [helper.make_empty_tensor_value_info(name) for name in outputs],
        [constant for constant in model.graph.initializer if constant.name in needed],
    )
    return helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)


def _reads(node: onnx.NodeProto) -> Iterator[str]:
    """All names that a node reads; a branch may also read tensors of the graph around it."""
    yield from node.input
    for attribute in node.attribute:
        for inner in attribute.g.node:
            yield from _reads(inner)
