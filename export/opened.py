"""A graph that was just written, ready to be asked: whole, or one task at a time where it is too large for that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import shape_inference
from onnx.utils import Extractor

from serving.bundle import INPUT_NAME, Graph, graph_name, part_name
from serving.decision import FEATURES, NETWORK_NAMES, OUTPUT_NAMES, Rule, complete
from serving.runtime import CPU
from serving.runtime import open_session as open_graph

AT_ONCE = 64
LARGE = 250_000_000
"""Weights from which on a graph is opened task by task: onnxruntime holds several copies of them while it loads."""

Outputs = dict[str, NDArray[Any]]


class TaskByTask:
    """Every task's own part of a graph in a session of its own, one after the other; the rest is put together here."""

    def __init__(self, folder: Path, precision: str, rule: Rule) -> None:
        self._folder = folder
        self._precision = precision
        self._rule = rule
        written = onnx.load(folder / graph_name(precision), load_external_data=False)
        self._model = shape_inference.infer_shapes(written, data_prop=True)

    def run(self, pixels: NDArray[np.uint8], size: int) -> Outputs:
        said = [self._task(task, pixels, size) for task in range(len(self._rule.tasks))]
        columns = [np.concatenate(column, axis=1) for column in zip(*said, strict=True)]
        together = dict(zip((*NETWORK_NAMES, FEATURES), columns, strict=True))
        whole = complete(together, self._rule) | {FEATURES: columns[-1]}
        return {name: values.astype(np.float32) for name, values in whole.items()}

    def _task(self, task: int, pixels: NDArray[np.uint8], size: int) -> list[NDArray[Any]]:
        # What joins the tasks names the parts of each.
        joins = {node.name: node.input[task] for node in self._model.graph.node if node.name.endswith("/join/Concat")}
        names = [joins[f"{name}/join/Concat"] for name in (*NETWORK_NAMES, FEATURES)]
        alone = Extractor(self._model).extract_model([INPUT_NAME], names)
        owners = (part_name(owner, self._precision) for owner in ("shared", f"task{task}"))
        files = [self._folder / name for name in owners if (self._folder / name).exists()]
        graph = Graph(alone.SerializeToString(), {path.name: path.read_bytes() for path in files})
        return list(_batches(open_graph(graph, quiet_options(), [CPU]), names, pixels, size).values())


def open_written(
    folder: Path, precision: str, rule: Rule, *, weights: int, cascaded: bool
) -> ort.InferenceSession | TaskByTask:
    """Open a graph of so many weights; the tasks of a cascade cannot be asked one by one."""
    if weights >= LARGE and not cascaded:
        return TaskByTask(folder, precision, rule)
    return open_session(folder, precision)


def open_session(folder: Path, precision: str) -> ort.InferenceSession:
    """A whole graph on the CPU."""
    parts = {path.name: path.read_bytes() for path in folder.glob(f"*.{precision}.bin")}
    return open_graph(Graph((folder / graph_name(precision)).read_bytes(), parts), quiet_options(), [CPU])


def quiet_options() -> ort.SessionOptions:
    """For a session that a person waits for: as fast as it can be, and no word but errors."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    return options


def run_graph(
    session: ort.InferenceSession | TaskByTask, pixels: NDArray[np.uint8], size: int = AT_ONCE
) -> dict[str, Any]:
    """All outputs, so many images at a time."""
    if isinstance(session, TaskByTask):
        return session.run(pixels, size)
    return _batches(session, [*OUTPUT_NAMES, FEATURES], pixels, size)


def _batches(session: ort.InferenceSession, names: list[str], pixels: NDArray[np.uint8], size: int) -> Outputs:
    parts = [session.run(names, {INPUT_NAME: pixels[start : start + size]}) for start in range(0, len(pixels), size)]
    return {name: np.concatenate(column) for name, column in zip(names, zip(*parts, strict=True), strict=True)}
