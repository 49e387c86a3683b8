"""The graph of a trunk in int8 (QDQ): convolutions and the sums between them, with ranges measured on photos.

Inputs and outputs of convolutions and sums become 8-bit numbers; everything else stays in floating point. Where the
ReLU or ReLU6 after a convolution ends, quantising does the same, so that the node is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from export.graph.trunk_ranges import Measured, measure_ranges
from models.trunks.trunk import INPUT, OUTPUT
from serving.bundle.directory import WriteError
from serving.bundle.manifest import Graph
from serving.bundle.session import open_session, session_options

LARGEST_WEIGHT, LARGEST_DEPTHWISE = 63, 127
"""Older CPUs add two products of a convolution over several channels in 16 bits, which 8-bit weights would overflow."""
FIRST = 3
"""Convolutions that stay in fp32. Their errors are in all later layers, and they are a small part of the work."""
LARGEST_BIAS = 2**30
"""Half of the range of 32 bits: the rest is for the sum that the bias is added to."""
STEPS = 255
ACTIVATIONS = ("Relu", "Clip")


class Quantization(NamedTuple):
    """value = scale * (number - zero)."""

    scale: float
    zero: int


def quantization_of(low: float, high: float) -> Quantization:
    """The 8-bit numbers over a range, which is extended to contain 0 exactly."""
    low, high = min(low, 0.0), max(high, 0.0, 1e-6 - low)
    scale = float(np.float32((high - low) / STEPS))
    return Quantization(scale, round(-low / scale))


class Int8Plan(NamedTuple):
    """Which convolutions and sums are computed in int8, and which tensors become 8-bit numbers for that."""

    nodes: frozenset[str]
    tensors: frozenset[str]
    activations: frozenset[str]
    """ReLUs after such a convolution, by name."""


def quantize(model: onnx.ModelProto, pixels: NDArray[np.uint8]) -> bytes:
    """A trunk in int8, with ranges from photos [n, size, size, 3]."""
    convolutions = [node.name for node in model.graph.node if node.op_type == "Conv"]
    plan = plan_of(model.graph, convolutions[:FIRST])
    if not plan.nodes:
        raise WriteError(
            f"int8: the trunk has {len(convolutions)} convolutions, of which the first {FIRST} stay in fp32; allowed: "
            "fp32, or a convolutional trunk"
        )
    rounded = write_int8(model, plan, measure_ranges(model, plan.tensors, pixels))
    exact, coarse = (_mean_vector(content, pixels) for content in (model.SerializeToString(), rounded))
    return _shifted(onnx.load_from_string(rounded), (exact - coarse).astype(np.float32))


def _mean_vector(content: bytes, pixels: NDArray[np.uint8]) -> NDArray[np.float64]:
    session = open_session(Graph(content, {}), session_options(1))
    vectors = [session.run([OUTPUT], {INPUT: pixels[place : place + 1]})[0] for place in range(len(pixels))]
    return np.asarray(np.concatenate(vectors).mean(axis=0, dtype=np.float64))


def _shifted(model: onnx.ModelProto, shift: NDArray[np.float32]) -> bytes:
    """The model with a constant added to the encoded vector."""
    (last,) = (node for node in model.graph.node if OUTPUT in node.output)
    last.output[0] = before = f"{OUTPUT}/rounded"
    model.graph.initializer.append(numpy_helper.from_array(shift, f"{OUTPUT}/shift"))
    model.graph.node.append(helper.make_node("Add", [before, f"{OUTPUT}/shift"], [OUTPUT], name=f"{OUTPUT}/shifted"))
    onnx.checker.check_model(model, full_check=True)
    return bytes(model.SerializeToString(deterministic=True))


def plan_of(graph: onnx.GraphProto, floats: Collection[str] = ()) -> Int8Plan:
    """The plan for a graph; the nodes named in `floats` stay in floating point."""
    constants = {tensor.name for tensor in graph.initializer}
    readers = Counter(name for node in graph.node for name in node.input)
    by_input = {node.input[0]: node for node in graph.node if node.input}
    nodes, tensors, activations = set[str](), set[str](), set[str]()
    for node in graph.node:
        if node.name in floats or node.op_type not in ("Conv", "Add"):
            continue
        inputs = [name for name in node.input if name not in constants]
        if node.op_type == "Conv" and node.input[1] not in constants:
            continue
        if node.op_type == "Add" and (len(inputs) != 2 or not {*inputs} <= tensors):
            continue
        after, out = by_input.get(node.output[0]), node.output[0]
        if after is not None and after.op_type in ACTIVATIONS and readers[out] == 1:
            activations.add(after.name)
            out = after.output[0]
        nodes.add(node.name)
        tensors |= {*inputs[:1], out} if node.op_type == "Conv" else {*inputs, out}
    return Int8Plan(frozenset(nodes), frozenset(tensors), frozenset(activations))


def write_int8(model: onnx.ModelProto, plan: Int8Plan, measured: Mapping[str, Measured]) -> bytes:
    """The model with the nodes of the plan in int8."""
    writer = _Int8Writer(model.graph, plan, measured)
    made = onnx.ModelProto()
    made.CopyFrom(model)
    graph = made.graph
    del graph.node[:], graph.initializer[:], graph.value_info[:]
    graph.node.extend(writer.nodes())
    used = {name for node in graph.node for name in node.input}
    graph.initializer.extend(tensor for name, tensor in writer.constants.items() if name in used)
    onnx.checker.check_model(made, full_check=True)
    return bytes(made.SerializeToString(deterministic=True))


class _Int8Writer:
    def __init__(self, graph: onnx.GraphProto, plan: Int8Plan, measured: Mapping[str, Measured]) -> None:
        self._graph = graph
        self._plan = plan
        self._measured = measured
        self.constants = {tensor.name: tensor for tensor in graph.initializer}

    def nodes(self) -> list[onnx.NodeProto]:
        """All nodes; a tensor of the plan is quantised and dequantised right after the node that computes it."""
        skipped = [node for node in self._graph.node if self._is_replaced(node)]
        names, renamed = {node.name for node in skipped}, {node.input[0]: node.output[0] for node in skipped}
        found: list[onnx.NodeProto] = []
        for original in self._graph.node:
            if original.name in names:
                continue
            node = onnx.NodeProto()
            node.CopyFrom(original)
            if node.name in self._plan.nodes and node.op_type == "Conv":
                found += self._weights(node)
            out = renamed.get(node.output[0], node.output[0])
            if out in self._plan.tensors:
                node.output[0] = f"{out}/float"
                found += [node, *self._rounded(out)]
            else:
                found.append(node)
        return found

    def _is_replaced(self, node: onnx.NodeProto) -> bool:
        """Whether a node is an activation that quantising its output replaces."""
        if node.name not in self._plan.activations:
            return False
        scale, zero = self._quantization(node.output[0])
        if node.op_type == "Relu":
            return zero == 0
        low, high = (float(numpy_helper.to_array(self.constants[name])) for name in node.input[1:3])
        return low == 0 and zero == 0 and scale * STEPS <= high * (1 + 1e-6)

    def _quantization(self, name: str) -> Quantization:
        return quantization_of(self._measured[name].low, self._measured[name].high)

    def _rounded(self, name: str) -> list[onnx.NodeProto]:
        scale, zero = self._quantization(name)
        names = [
            self._constant(f"{name}/scale", np.float32(scale)),
            self._constant(f"{name}/zero", np.array(zero, np.uint8)),
        ]
        quantized = f"{name}/int8"
        return [
            helper.make_node("QuantizeLinear", [f"{name}/float", *names], [quantized], name=f"{name}/quantize"),
            helper.make_node("DequantizeLinear", [quantized, *names], [name], name=f"{name}/dequantize"),
        ]

    def _weights(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """Replace the weight and bias of a convolution by dequantised integers; returns the nodes that make them."""
        images, path = node.input[0], node.name
        weight = numpy_helper.to_array(self.constants[node.input[1]]).astype(np.float64)
        bias = np.zeros(len(weight))
        if len(node.input) > 2:
            bias = numpy_helper.to_array(self.constants[node.input[2]]).astype(np.float64)
        step = self._quantization(images).scale
        depthwise = weight.shape[1] == 1
        scale = np.abs(weight).max(axis=(1, 2, 3)) / (LARGEST_DEPTHWISE if depthwise else LARGEST_WEIGHT)
        scale = np.maximum(scale, np.abs(bias) / (step * LARGEST_BIAS))
        scale = np.maximum(scale, 1e-12).astype(np.float32).astype(np.float64)
        rows = np.rint(weight / scale[:, None, None, None])
        bias = bias - self._mean_error(node, rows * scale[:, None, None, None] - weight)
        steps = (scale * step).astype(np.float32)
        whole = np.rint(bias / steps.astype(np.float64)).astype(np.int32)
        made = [
            (f"{path}/weight", rows.astype(np.int8), scale.astype(np.float32)),
            (f"{path}/bias", whole, steps),
        ]
        nodes = []
        for name, values, sizes in made:
            names = [self._constant(f"{name}/int", values), self._constant(f"{name}/scale", sizes)]
            nodes.append(helper.make_node("DequantizeLinear", names, [f"{name}/value"], name=f"{name}/value", axis=0))
        del node.input[1:]
        node.input.extend(f"{name}/value" for name, _, _ in made)
        return nodes

    def _mean_error(self, node: onnx.NodeProto, error: NDArray[np.float64]) -> NDArray[np.float64]:
        """What the rounding of the weights adds to each output channel on average, at the means of the inputs."""
        means = self._measured[node.input[0]].means
        per_channel = error.sum(axis=(2, 3))
        outs, ins = per_channel.shape
        groups = len(means) // ins
        grouped = means.reshape(groups, 1, ins)
        shift: NDArray[np.float64] = (per_channel.reshape(groups, outs // groups, ins) * grouped).sum(axis=2)
        return shift.reshape(outs)

    def _constant(self, name: str, values: Any) -> str:
        self.constants[name] = numpy_helper.from_array(np.asarray(values), name)
        return name
