"""A part of a graph that was written, as a graph of its own: it takes the memory of that part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import onnx
import onnxruntime as ort
from onnx import helper
from onnx.external_data_helper import ExternalDataInfo, uses_external_data

from serving.bundle import Graph
from serving.layout import graph_name
from serving.runtime import CPU, open_session, session_options


def load_nodes(folder: Path, precision: str) -> onnx.ModelProto:
    """A graph whose weights stay in their files."""
    return onnx.load(folder / graph_name(precision), load_external_data=False)


def open_part(
    folder: Path, model: onnx.ModelProto, inputs: Mapping[str, int], outputs: Sequence[str]
) -> ort.InferenceSession:
    """What leads from some tensors (name -> ONNX type) to others, with its weights, set up as in a server."""
    alone = cut(model, inputs, outputs)
    files = {ExternalDataInfo(tensor).location for tensor in alone.graph.initializer if uses_external_data(tensor)}
    graph = Graph(alone.SerializeToString(), {name: (folder / name).read_bytes() for name in sorted(files)})
    return open_session(graph, session_options(0), [CPU])


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
        "part",
        [helper.make_tensor_value_info(name, kind, None) for name, kind in inputs.items()],
        [helper.make_empty_tensor_value_info(name) for name in outputs],
        [constant for constant in model.graph.initializer if constant.name in needed],
    )
    return helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)


def _reads(node: onnx.NodeProto) -> Iterator[str]:
    """All names that a node reads; those of a branch may stand in the graph around it."""
    yield from node.input
    for attribute in node.attribute:
        for inner in attribute.g.node:
            yield from _reads(inner)
