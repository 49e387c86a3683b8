"""Writes the ONNX graph of a trunk: its input, its layers, and the vector that is made of several depths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from models.trunks.trunk import INPUT, OUTPUT

OPSET, IR_VERSION = 23, 10
"""As in export/graph/writer.py: the newest opset for which onnxruntime has CUDA kernels of all nodes."""
SHORTEST = 1e-12
"""A part of a vector that is shorter than this is not scaled to unit length."""


class Depth(NamedTuple):
    """A vector per image [n, width] at one depth of the network, and the constants that centre and scale it."""

    name: str
    mean: NDArray[np.float64]
    std: NDArray[np.float64]


class TrunkGraph:
    """The nodes and constants of a graph, in the order in which they are added."""

    def __init__(self) -> None:
        self._nodes: list[onnx.NodeProto] = []
        self._constants: dict[str, onnx.TensorProto] = {}

    def add(self, kind: str, name: str, inputs: Sequence[str], **attributes: Any) -> str:
        """Add a node; returns the name of its output, which is also its own."""
        self._nodes.append(helper.make_node(kind, list(inputs), [name], name=name, **attributes))
        return name

    def constant(self, name: str, value: NDArray[Any] | Sequence[int] | float) -> str:
        """Add a tensor: floats become float32, sequences of integers int64."""
        array = np.asarray(value)
        array = array.astype(np.float32) if array.dtype == np.float64 else array
        self._constants[name] = numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), name)
        return name

    def planes(self) -> str:
        """The pixels as floats in 0..255, [n, 3, size, size]."""
        floats = self.add("Cast", "pixels/float", [INPUT], to=TensorProto.FLOAT)
        return self.add("Transpose", "pixels/planes", [floats], perm=[0, 3, 1, 2])

    def averaged(self, name: str, maps: str) -> str:
        """The global average of feature maps: [n, channels, height, width] -> [n, channels]."""
        return self.add("Flatten", f"{name}/vector", [self.add("GlobalAveragePool", f"{name}/average", [maps])], axis=1)

    def join(self, depths: Sequence[Depth]) -> None:
        """Centre and scale each depth, give it unit length, and write them side by side as the output."""
        parts = []
        for name, mean, std in depths:
            centred = self.add("Sub", f"{name}/centred", [name, self.constant(f"{name}/mean", mean)])
            scaled = self.add("Mul", f"{name}/scaled", [centred, self.constant(f"{name}/scale", 1 / std)])
            length = self.add("ReduceL2", f"{name}/length", [scaled, self.constant(f"{name}/axis", [1])], keepdims=1)
            least = self.add("Max", f"{name}/least", [length, self.constant(f"{name}/shortest", SHORTEST)])
            parts.append(self.add("Div", f"{name}/unit", [scaled, least]))
        joined = self.add("Concat", "joined", parts, axis=1)
        share = self.constant("share", 1 / math.sqrt(len(parts)))
        self.add("Mul", OUTPUT, [joined, share])

    def extend(self, graph: onnx.GraphProto) -> None:
        """Add the nodes and constants of another graph, whose names must be different."""
        self._nodes += graph.node
        self._constants |= {tensor.name: tensor for tensor in graph.initializer}

    def model(self, size: int, dim: int, like: onnx.ModelProto | None = None) -> bytes:
        """The checked and serialised model, with the operators and functions of the model that it extends."""
        pixels = helper.make_tensor_value_info(INPUT, TensorProto.UINT8, ["batch", size, size, 3])
        encoded = helper.make_tensor_value_info(OUTPUT, TensorProto.FLOAT, ["batch", dim])
        graph = helper.make_graph(self._nodes, "trunk", [pixels], [encoded], list(self._constants.values()))
        opsets = [helper.make_opsetid("", OPSET)] if like is None else like.opset_import
        model = helper.make_model(
            graph,
            functions=[] if like is None else like.functions,
            opset_imports=opsets,
            ir_version=IR_VERSION if like is None else like.ir_version,
            producer_name="openworld",
        )
        onnx.checker.check_model(model, full_check=True)
        return bytes(model.SerializeToString(deterministic=True))
