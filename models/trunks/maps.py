"""Adds the feature maps behind each part of an encoded vector to the graph of a trunk, as further outputs.

A part of the vector is the average of a feature map over space, centred, scaled and brought to unit length. The added
output is that map [n, width, height, width of the map], centred and scaled, so its average over space is the part up to
the length.

onnxruntime computes all outputs of a graph, also those that nobody asks for. So this is a graph of its own, which a
server opens at the first explanation; its weights are those in the file of the trunk.
"""

from __future__ import annotations

import onnx
from onnx import TensorProto, helper

from models.trunks.trunk import OUTPUT

MAP = "map"
"""Followed by the number of the part."""


SHARED = 1024
"""Bytes of a constant from which on it is not repeated."""


def maps_beside(model: bytes, file: str) -> bytes:
    """The graph of `with_maps` for a folder that has the trunk's own graph in `file`: large constants are read from
    there."""
    loaded = onnx.load_model_from_string(with_maps(model))
    for constant in loaded.graph.initializer:
        content = constant.raw_data
        if len(content) < SHARED or (offset := model.find(content)) < 0:
            continue
        constant.ClearField("raw_data")
        constant.data_location = TensorProto.EXTERNAL
        for key, value in (("location", file), ("offset", offset), ("length", len(content))):
            constant.external_data.add(key=key, value=str(value))
    return bytes(loaded.SerializeToString(deterministic=True))


def with_maps(model: bytes) -> bytes:
    """The same graph with one more output for each part of the vector that is an average of a map.

    Parts that are not, such as the class token of a transformer, get none.
    """
    loaded = onnx.load_model_from_string(model)
    graph = loaded.graph
    made = {output: node for node in graph.node for output in node.output}
    joined = made[made[OUTPUT].input[0]]
    for part, unit in enumerate(joined.input):
        scaled = made[made[unit].input[0]]
        centred = made[scaled.input[0]]
        if (maps := _pooled_map(centred.input[0], made)) is None:
            continue
        mean, scale = (_per_channel(graph, name) for name in (centred.input[1], scaled.input[1]))
        name = f"{MAP}{part}"
        graph.node.append(helper.make_node("Sub", [maps, mean], [f"{name}/centred"], name=f"{name}/centred"))
        graph.node.append(helper.make_node("Mul", [f"{name}/centred", scale], [name], name=name))
        width = next(tensor.dims[0] for tensor in graph.initializer if tensor.name == mean)
        shape = ["batch", width, f"{name}/height", f"{name}/width"]
        graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
    onnx.checker.check_model(loaded, full_check=True)
    return bytes(loaded.SerializeToString(deterministic=True))


def _pooled_map(vector: str, made: dict[str, onnx.NodeProto]) -> str | None:
    """The map whose average over space is this vector; None if it is not one."""
    flat = made.get(vector)
    if flat is None or flat.op_type != "Flatten":
        return None
    pool = made.get(flat.input[0])
    return pool.input[0] if pool is not None and pool.op_type == "GlobalAveragePool" else None


def _per_channel(graph: onnx.GraphProto, name: str) -> str:
    """A copy of a constant [channels] in the shape [channels, 1, 1]; returns its name."""
    (constant,) = [tensor for tensor in graph.initializer if tensor.name == name]
    shaped = onnx.TensorProto()
    shaped.CopyFrom(constant)
    shaped.name = f"{name}/per channel"
    shaped.dims[:] = [constant.dims[0], 1, 1]
    graph.initializer.append(shaped)
    return shaped.name
