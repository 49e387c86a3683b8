"""Adds the feature maps behind each part of an encoded vector to the graph of a trunk, as further outputs.

A part of the vector may be the average of a feature map over space, centred, scaled and brought to unit length. The
added output is that map [n, width, height, width of the map], centred and scaled. Its average over space is the part
before it is brought to unit length.

onnxruntime computes all outputs of a graph, also those that are not requested. So this is a separate graph, which a
server opens at the first explanation. It uses the weights in the file of the trunk.
"""

from __future__ import annotations

from typing import Any

import onnx
from onnx import TensorProto, helper, numpy_helper, shape_inference

from models.trunks.trunk import OUTPUT

MAP = "map"
"""Followed by the number of the part."""
SAME_NUMBERS = ("Cast", "Identity", "Reshape", "Squeeze", "Flatten")
"""Nodes behind an average that give its numbers another shape or type, in the same order."""
FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)
SPATIAL = {2, 3}
"""The axes of a feature map [n, channels, height, width] that are averaged."""
SHARED = 1024
"""Bytes of a constant from which on it is not repeated."""


def maps_beside(model: bytes, file: str) -> bytes | None:
    """The graph of `with_maps` for a folder that has the trunk's own graph in `file`: large constants are read from
    there. None if no part has a map."""
    if (content := with_maps(model)) is None:
        return None
    loaded = onnx.load_model_from_string(content)
    for constant in loaded.graph.initializer:
        content = constant.raw_data
        if len(content) < SHARED or (offset := model.find(content)) < 0:
            continue
        constant.ClearField("raw_data")
        constant.data_location = TensorProto.EXTERNAL
        for key, value in (("location", file), ("offset", offset), ("length", len(content))):
            constant.external_data.add(key=key, value=str(value))
    return bytes(loaded.SerializeToString(deterministic=True))


def with_maps(model: bytes) -> bytes | None:
    """The same graph with one more output for each part of the vector that is the average of a feature map.

    Returns None if no part is. The class token of a transformer is no average of a map. An average that was changed
    afterwards, for example by a normalisation, does not count either.
    """
    loaded = onnx.load_model_from_string(model)
    graph = loaded.graph
    values = _Values(loaded)
    joined = values.made[values.made[OUTPUT].input[0]]
    before = len(graph.output)
    for part, unit in enumerate(joined.input):
        scaled = values.made[values.made[unit].input[0]]
        centred = values.made[scaled.input[0]]
        width = next(tensor.dims[0] for tensor in graph.initializer if tensor.name == centred.input[1])
        if (maps := values.averaged_map(centred.input[0], width)) is None:
            continue
        mean, scale = (_per_channel(graph, name) for name in (centred.input[1], scaled.input[1]))
        name = f"{MAP}{part}"
        if values.kind(maps) != TensorProto.FLOAT:
            graph.node.append(helper.make_node("Cast", [maps], [f"{name}/floats"], to=TensorProto.FLOAT))
            maps = f"{name}/floats"
        graph.node.append(helper.make_node("Sub", [maps, mean], [f"{name}/centred"], name=f"{name}/centred"))
        graph.node.append(helper.make_node("Mul", [f"{name}/centred", scale], [name], name=name))
        shape = ["batch", width, f"{name}/height", f"{name}/width"]
        graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
    if len(graph.output) == before:
        return None
    onnx.checker.check_model(loaded, full_check=True)
    return bytes(loaded.SerializeToString(deterministic=True))


class _Values:
    """What the values of a graph are computed from, and their types and shapes."""

    def __init__(self, model: onnx.ModelProto) -> None:
        graph = shape_inference.infer_shapes(model).graph
        self.made = {output: node for node in graph.node for output in node.output}
        self._types = {value.name: value.type.tensor_type for value in (*graph.value_info, *graph.input)}
        self._constants = {tensor.name: tensor for tensor in graph.initializer}

    def kind(self, name: str) -> int:
        """The type of the numbers of a value."""
        return int(self._types[name].elem_type)

    def averaged_map(self, vector: str, width: int) -> str | None:
        """The map [n, width, height, width of the map] whose average over space is this vector; None if it is none."""
        node = self.made.get(vector)
        while node is not None and node.op_type in SAME_NUMBERS:
            if node.op_type == "Cast" and _attribute(node, "to", 0) not in FLOATS:
                return None
            node = self.made.get(node.input[0])
        if node is None or not self._averages_space(node):
            return None
        found = self._types.get(node.input[0])
        sides = found.shape.dim if found is not None else []
        return node.input[0] if len(sides) == 4 and sides[1].dim_value == width else None

    def _averages_space(self, node: onnx.NodeProto) -> bool:
        if node.op_type != "ReduceMean":
            return node.op_type == "GlobalAveragePool"
        axes = _attribute(node, "axes", None)
        if axes is None and len(node.input) > 1:
            axes = self._constant(node.input[1])
        return axes is not None and {axis % 4 for axis in axes} == SPATIAL

    def _constant(self, name: str) -> list[int] | None:
        """The numbers of a constant; None if they are computed."""
        tensor = self._constants.get(name)
        if tensor is None and (node := self.made.get(name)) is not None and node.op_type == "Constant":
            tensor = _attribute(node, "value", None)
        return None if tensor is None else [int(number) for number in numpy_helper.to_array(tensor).reshape(-1)]


def _attribute(node: onnx.NodeProto, name: str, default: Any) -> Any:
    found = (helper.get_attribute_value(each) for each in node.attribute if each.name == name)
    return next(found, default)


def _per_channel(graph: onnx.GraphProto, name: str) -> str:
    """A copy of a constant [channels] in the shape [channels, 1, 1]; returns its name."""
    (constant,) = [tensor for tensor in graph.initializer if tensor.name == name]
    shaped = onnx.TensorProto()
    shaped.CopyFrom(constant)
    shaped.name = f"{name}/per channel"
    shaped.dims[:] = [constant.dims[0], 1, 1]
    graph.initializer.append(shaped)
    return shaped.name
