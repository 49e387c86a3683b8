"""Any ONNX feature extractor as a trunk: pixels are normalised before it, and its outputs get unit length after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, compose, shape_inference, version_converter

from models.trunks.graph import Depth, TrunkGraph
from models.trunks.trunk import INPUT

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Means and deviations of red, green and blue in 0..1, as nearly all networks trained on ImageNet expect them."""
LEAST_OPSET = 18
"""Models of an older one are converted: the nodes around them are written for this."""
BODY = "body/"
FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16)
ROWS, PLANES = "nhwc", "nchw"
LAYOUTS = (PLANES, ROWS)
FIRST, MEAN = "first", "mean"
POOLS = (FIRST, MEAN)
"""What becomes one vector of a sequence: its first token, or the mean of all."""
CHANNELS = 3


class Normalisation(NamedTuple):
    """Subtracted from and divided out of the channels of pixels in 0..1."""

    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD


class ImageInput(NamedTuple):
    """The input of a feature extractor."""

    name: str
    kind: int
    """Its element type."""
    layout: str
    side: int | None
    """Height and width of its images; None if the model leaves that open."""

    @property
    def places(self) -> tuple[int, int]:
        """Where its shape has height and width."""
        return (2, 3) if self.layout == PLANES else (1, 2)


def image_input(model: onnx.ModelProto, layout: str | None = None) -> ImageInput:
    """The one input of a model; raises a ValueError if it is not a batch of colour images.

    `layout` is needed if the shape leaves open where the channels are.
    """
    given = {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in given]
    if len(inputs) != 1:
        names = ", ".join(map(shown, inputs)) or "none"
        raise ValueError(f"its inputs are {names}; allowed: one, for images: export the part that encodes images")
    (value,) = inputs
    tensor = value.type.tensor_type
    if tensor.elem_type not in (*FLOATS, TensorProto.UINT8):
        kind = TensorProto.DataType.Name(tensor.elem_type)
        raise ValueError(f"input {value.name!r} is {kind}; allowed: FLOAT or FLOAT16, normalised, or UINT8")
    shape = [side.dim_value if side.HasField("dim_value") else None for side in tensor.shape.dim]
    fitting = [each for each, place in ((PLANES, 1), (ROWS, 3)) if len(shape) == 4 and shape[place] in (None, CHANNELS)]
    exact = [each for each in fitting if shape[1 if each == PLANES else 3] == CHANNELS]
    fitting = exact or fitting
    if not fitting or (layout is not None and layout not in fitting):
        wanted = "" if layout is None else f" with layout={layout}"
        raise ValueError(
            f"input {shown(value)} cannot be a batch of colour images{wanted}; allowed: [batch, 3, height, width] "
            f"({PLANES}) or [batch, height, width, 3] ({ROWS})"
        )
    if layout is None and len(fitting) > 1:
        raise ValueError(
            f"input {shown(value)} leaves open where the channels are; give it with --trunk-option layout={PLANES} "
            f"(before height and width) or layout={ROWS} (after them)"
        )
    found = ImageInput(value.name, tensor.elem_type, layout or fitting[0], None)
    height, width = (shape[place] for place in found.places)
    if height and width and height != width:
        raise ValueError(f"input {shown(value)} is for images of {height} x {width} pixels; allowed: square ones")
    return found._replace(side=height or width or None)


def prepared(model: onnx.ModelProto, source: ImageInput, size: int) -> onnx.ModelProto:
    """The model in an opset that can be extended, for a batch of any length and images of one size, with all shapes."""
    version = next((one.version for one in model.opset_import if one.domain in ("", "ai.onnx")), LEAST_OPSET)
    if version < LEAST_OPSET:
        model = version_converter.convert_version(model, LEAST_OPSET)
    if source.side not in (None, size):
        raise ValueError(
            f"it is for images of {source.side} x {source.side} pixels; got --size {size}: leave that out, or export "
            "the network for that size"
        )
    for value in model.graph.input:
        if value.name == source.name:
            shape = value.type.tensor_type.shape
            shape.dim[0].dim_param = "batch"
            for place in source.places:
                shape.dim[place].dim_value = size
    # The widths of outputs are often left open, and follow from the input.
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    return shape_inference.infer_shapes(model, data_prop=True)


class Wrapped(NamedTuple):
    """A trunk's graph, the widths of its parts, and the outputs that they are made of."""

    model: bytes
    depths: tuple[int, ...]
    outputs: tuple[str, ...]


def wrap(
    model: onnx.ModelProto,
    source: ImageInput,
    size: int,
    normalisation: Normalisation,
    outputs: Sequence[str] = (),
    pool: str = FIRST,
) -> Wrapped:
    """The graph around a model: `outputs` are those that are read, by default the one that has a vector per image."""
    model = prepared(model, source, size)
    names = chosen_outputs(model, outputs)
    body = compose.add_prefix(_bare(model), BODY)
    graph = TrunkGraph()
    graph.add("Identity", BODY + source.name, [_normalised(graph, source, normalisation)])
    graph.extend(body.graph)
    shapes = {value.name: value for value in model.graph.output}
    depths = []
    for name in names:
        width = _width(shapes[name])
        assert width is not None
        vector = _vector(graph, name, shapes[name], pool)
        depths.append(Depth(vector, np.zeros(width), np.ones(width)))
    graph.join(depths)
    for opset in body.opset_import:
        # The standard one has two names.
        opset.domain = "" if opset.domain == "ai.onnx" else opset.domain
    widths = tuple(len(depth.mean) for depth in depths)
    return Wrapped(graph.model(size, sum(widths), body), widths, names)


def chosen_outputs(model: onnx.ModelProto, wanted: Sequence[str]) -> tuple[str, ...]:
    """The outputs to read; raises a ValueError if they do not exist, cannot be used, or several may be meant."""
    values = {value.name: value for value in model.graph.output}
    has = f"the model has {', '.join(map(shown, values.values()))}"
    forms = "[batch, numbers], [batch, tokens, numbers] or [batch, channels, height, width]"
    if missing := [name for name in wanted if name not in values]:
        raise ValueError(f"there is no output {', '.join(missing)}; {has}")
    usable = [name for name, value in values.items() if _width(value) is not None]
    if unusable := [name for name in wanted if name not in usable]:
        raise ValueError(f"output {shown(values[unusable[0]])} cannot be used; allowed: {forms} of known width; {has}")
    if wanted:
        return tuple(wanted)
    vectors = [name for name in usable if len(values[name].type.tensor_type.shape.dim) == 2]
    found = vectors or usable
    if not found:
        raise ValueError(f"no output can be used; allowed: {forms} of known width; {has}")
    if len(found) > 1:
        raise ValueError(f"several outputs may be meant; choose with --trunk-option output={found[0]}; {has}")
    return (found[0],)


def _vector(graph: TrunkGraph, name: str, value: onnx.ValueInfoProto, pool: str) -> str:
    """One vector per image of an output: as it is, of a sequence of tokens, or the mean of feature maps."""
    values = graph.add("Cast", f"{name}/floats", [BODY + name], to=TensorProto.FLOAT)
    sides = len(value.type.tensor_type.shape.dim)
    if sides == 4:
        return graph.averaged(name, values)
    if sides == 3 and pool == MEAN:
        axis = graph.constant(f"{name}/tokens", [1])
        return graph.add("ReduceMean", f"{name}/mean_token", [values, axis], keepdims=0)
    if sides == 3:
        return graph.add(
            "Gather", f"{name}/first_token", [values, graph.constant(f"{name}/first", np.array(0, np.int64))], axis=1
        )
    return values


def _normalised(graph: TrunkGraph, source: ImageInput, normalisation: Normalisation) -> str:
    """The input of the model from the pixels of the trunk; uint8 is passed on as it is."""
    pixels = INPUT
    if source.kind in FLOATS:
        # (x / 255 - mean) / std, with one product and one difference.
        mean, std = (np.array(values, np.float64) for values in normalisation)
        floats = graph.add("Cast", "pixels/float", [INPUT], to=TensorProto.FLOAT)
        scaled = graph.add("Mul", "pixels/scaled", [floats, graph.constant("pixels/scale", 1 / (255 * std))])
        pixels = graph.add("Sub", "pixels/centred", [scaled, graph.constant("pixels/mean", mean / std)])
        if source.kind != TensorProto.FLOAT:
            pixels = graph.add("Cast", "pixels/half", [pixels], to=source.kind)
    return graph.add("Transpose", "pixels/planes", [pixels], perm=[0, 3, 1, 2]) if source.layout == PLANES else pixels


def _bare(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model without notes of its exporter, which may name files of the machine that it ran on."""
    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    del bare.metadata_props[:]
    bare.doc_string = bare.graph.doc_string = ""
    graph = bare.graph
    del graph.metadata_props[:]
    del graph.value_info[:]
    for part in (graph.node, graph.input, graph.output, graph.initializer):
        for item in part:
            item.doc_string = ""
            del item.metadata_props[:]
    return bare


def _width(value: onnx.ValueInfoProto) -> int | None:
    """How many numbers a vector of the output has; None if that is not known, or if it has no vectors."""
    shape = value.type.tensor_type.shape.dim
    place = {2: 1, 3: 2, 4: 1}.get(len(shape))
    return None if place is None else shape[place].dim_value or None


def shown(value: onnx.ValueInfoProto) -> str:
    """Such as "images [batch, 3, 224, 224]"."""
    sides = value.type.tensor_type.shape.dim
    texts = [str(side.dim_value) if side.HasField("dim_value") else side.dim_param or "?" for side in sides]
    return f"{value.name} [{', '.join(texts)}]"
