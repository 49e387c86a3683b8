"""One ONNX graph for a whole network: 8-bit pixels in, what the decision reads out.

The graph is written layer by layer from the baked modules, not traced: it is the same to the byte each time, its nodes
bear the names of tasks and layers, and ternary weights stay bits until onnxruntime unpacks them when it loads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from export.bake import BakedNetwork, BakedTask
from models.baked import Align, BakedConv2d, BakedLinear, Ternary
from models.heads import ROTATIONS
from models.resnet import BakedResidualBlock, GlobalPool
from models.weight_mask import pack_bits
from serving.bundle import INPUT_NAME, ImageSpec
from serving.decision import OUTPUT_NAMES

OPSET, IR_VERSION = 23, 10
LAST = np.iinfo(np.int64).min
"""Where a slice that runs backwards ends when it takes everything."""


def to_onnx(baked: BakedNetwork, image: ImageSpec, metadata: dict[str, str]) -> bytes:
    """A checked graph with a dynamic batch, as bytes."""
    writer = GraphWriter()
    turned = _pixels(writer, baked)
    columns = [_task(writer, f"task{number}", task, turned) for number, task in enumerate(baked.baked_tasks)]
    for name, parts in zip(OUTPUT_NAMES, zip(*columns, strict=True), strict=True):
        writer.add("Concat", f"{name}/join", list(parts), output=name, axis=1)
    classes = sum(task.head.classes for task in baked.baked_tasks)
    return writer.finish(image, classes, metadata)


class GraphWriter:
    """Nodes and constants of a graph, as they are written."""

    def __init__(self) -> None:
        self._nodes: list[onnx.NodeProto] = []
        self._constants: dict[str, onnx.TensorProto] = {}
        self._signs: dict[int, str] = {}

    def add(self, kind: str, path: str, inputs: Sequence[str], *, output: str | None = None, **attributes: Any) -> str:
        """A node named path/kind; the name of its output."""
        name = f"{path}/{kind}"
        output = output or name
        self._nodes.append(helper.make_node(kind, list(inputs), [output], name=name, **attributes))
        return output

    def constant(self, name: str, value: Tensor | NDArray[Any] | Sequence[int] | float) -> str:
        """A named tensor; numbers become float32, sequences of whole numbers int64."""
        if isinstance(value, Tensor):
            array: NDArray[Any] = value.detach().cpu().numpy()
        elif isinstance(value, float):
            array = np.array(value, dtype=np.float32)
        else:
            array = np.asarray(value)
        self._constants.setdefault(
            name, numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), name)
        )
        return name

    def weights(self, path: str, layer: BakedConv2d | BakedLinear) -> str:
        """A layer's weights: as they are, or as bits with the nodes that unpack them."""
        if layer.ternary is None:
            return self.constant(f"{path}/weight", layer.weight)
        return self._unpacked(path, layer.ternary, layer.weight.shape)

    def _unpacked(self, path: str, ternary: Ternary, shape: torch.Size) -> str:
        """(2 * sign - 1) * mask * scale, from bits. All constant, so that onnxruntime does it once, when it loads."""
        name = self._signs.get(ternary.signs.data_ptr())
        if name is None:
            # All tasks share the layer's signs: they are stored and unpacked once, under the first task's name.
            name = self._signs[ternary.signs.data_ptr()] = self._signed(f"{path}/signs", ternary.signs, shape)
        mask = self._bits(f"{path}/mask", ternary.mask, shape)
        kept = self.add("Mul", f"{path}/kept", [name, mask])
        scale = self.constant(f"{path}/scale", ternary.scale.view(-1, *[1] * (len(shape) - 1)))
        return self.add("Mul", f"{path}/weight", [kept, scale])

    def _signed(self, path: str, signs: Tensor, shape: torch.Size) -> str:
        bits = self._bits(path, signs, shape)
        doubled = self.add("Add", f"{path}/doubled", [bits, bits])
        return self.add("Sub", f"{path}/signed", [doubled, self.constant("one", 1.0)])

    def _bits(self, path: str, mask: Tensor, shape: torch.Size) -> str:
        """Packed bits to floats of a shape, lowest bit first."""
        packed = self.constant(f"{path}/packed", pack_bits(mask).view(-1, 1))
        shifts = self.constant("bit_numbers", np.arange(8, dtype=np.uint8))
        lowest = self.constant("lowest_bit", np.array(1, dtype=np.uint8))
        moved = self.add("BitShift", f"{path}/moved", [packed, shifts], direction="RIGHT")
        bits = self.add("BitwiseAnd", f"{path}/bit", [moved, lowest])
        flat = self.add("Reshape", f"{path}/flat", [bits, self.constant("flat", [-1])])
        if mask.numel() % 8:
            ends = [self.constant(f"{path}/{key}", [number]) for key, number in (("from", 0), ("to", mask.numel()))]
            flat = self.add("Slice", f"{path}/cut", [flat, *ends])
        shaped = self.add("Reshape", f"{path}/shaped", [flat, self.constant(f"{path}/shape", list(shape))])
        return self.add("Cast", f"{path}/float", [shaped], to=TensorProto.FLOAT)

    def finish(self, image: ImageSpec, classes: int, metadata: dict[str, str]) -> bytes:
        graph = helper.make_graph(
            self._nodes,
            "openworld",
            [helper.make_tensor_value_info(INPUT_NAME, TensorProto.UINT8, ["batch", *image.shape])],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", classes]) for name in OUTPUT_NAMES],
            list(self._constants.values()),
        )
        model = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION, producer_name="openworld"
        )
        helper.set_model_props(model, metadata)
        onnx.checker.check_model(model, full_check=True)
        return bytes(model.SerializeToString(deterministic=True))


def _pixels(writer: GraphWriter, baked: BakedNetwork) -> str:
    """Bytes to normalised images in all four rotations, one rotation after the other."""
    images = writer.add("Transpose", "pixels/channels_first", [INPUT_NAME], perm=[0, 3, 1, 2])
    images = writer.add("Cast", "pixels/float", [images], to=TensorProto.FLOAT)
    images = writer.add("Div", "pixels/unit", [images, writer.constant("white", 255.0)])
    images = writer.add("Sub", "pixels/centred", [images, writer.constant("mean", float(baked.mean))])
    images = writer.add("Div", "pixels/normal", [images, writer.constant("std", float(baked.std))])
    across = writer.add("Transpose", "pixels/across", [images], perm=[0, 1, 3, 2])
    turned = [
        images,
        _flip(writer, "pixels/turned90", across, [2]),
        _flip(writer, "pixels/turned180", images, [2, 3]),
        _flip(writer, "pixels/turned270", across, [3]),
    ]
    return writer.add("Concat", "pixels/rotations", turned, axis=0)


def _flip(writer: GraphWriter, path: str, images: str, axes: list[int]) -> str:
    back = writer.constant(f"backwards{len(axes)}", [-1] * len(axes))
    ends = writer.constant(f"ends{len(axes)}", [int(LAST)] * len(axes))
    return writer.add("Slice", path, [images, back, ends, writer.constant(f"{path}/axes", axes), back])


def _task(writer: GraphWriter, path: str, task: BakedTask, turned: str) -> tuple[str, str]:
    """A task's logits and distances, each [n, classes]."""
    flat = _layer(writer, f"{path}/body", task.body, turned)
    count = task.head.weight.shape[1]
    shape = writer.constant(f"{path}/features/shape", [ROTATIONS, -1, count])
    features = writer.add("Reshape", f"{path}/features", [flat, shape])
    first = writer.constant("first_axis", [0])

    head = task.head
    weight = writer.constant(f"{path}/head/weight", head.weight * head.scale)
    bias = writer.constant(f"{path}/head/bias", head.bias * head.scale + head.shift)
    scored = writer.add("MatMul", f"{path}/head/score", [features, weight])
    scored = writer.add("Add", f"{path}/head/biased", [scored, bias])
    logits = writer.add("ReduceMean", f"{path}/head/ensemble", [scored, first], keepdims=0)

    last = writer.constant("last_axis", [-1])
    length = writer.add("ReduceL2", f"{path}/distance/length", [features, last], keepdims=1)
    length = writer.add("Max", f"{path}/distance/length", [length, writer.constant("tiny", 1e-12)])
    direction = writer.add("Div", f"{path}/distance/direction", [features, length])
    whitening = writer.constant(f"{path}/distance/whitening", task.distance.whitening)
    white = writer.add("MatMul", f"{path}/distance/white", [direction, whitening])
    rows = writer.add("Unsqueeze", f"{path}/distance/rows", [white, writer.constant("class_axis", [2])])
    means = writer.constant(f"{path}/distance/means", task.distance.means[:, None])
    difference = writer.add("Sub", f"{path}/distance/difference", [rows, means])
    squared = writer.add("ReduceSumSquare", f"{path}/distance/squared", [difference, last], keepdims=0)
    return logits, writer.add("ReduceMean", f"{path}/distance/mean", [squared, first], keepdims=0)


def _layer(writer: GraphWriter, path: str, layer: nn.Module, images: str) -> str:
    """Write one baked module; every kind that baking can leave is here, so a new one fails loudly."""
    match layer:
        case nn.Sequential():
            for name, part in layer.named_children():
                images = _layer(writer, f"{path}/{name}", part, images)
            return images
        case BakedConv2d():
            inputs = [images, writer.weights(path, layer)]
            if layer.bias is not None:
                inputs.append(writer.constant(f"{path}/bias", layer.bias))
            padding = [int(side) for side in layer.padding] * 2
            return writer.add("Conv", path, inputs, strides=list(layer.stride), pads=padding)
        case BakedLinear():
            inputs = [images, writer.weights(path, layer)]
            if layer.bias is not None:
                inputs.append(writer.constant(f"{path}/bias", layer.bias))
            return writer.add("Gemm", path, inputs, transB=1)
        case nn.ReLU():
            return writer.add("Relu", path, [images])
        case nn.MaxPool2d():
            return writer.add("MaxPool", path, [images], kernel_shape=[2, 2], strides=[2, 2])
        case nn.Flatten():
            return writer.add("Flatten", path, [images])
        case GlobalPool():
            axes = writer.constant("image_axes", [2, 3])
            return writer.add("ReduceMean", path, [images, axes], keepdims=0)
        case BakedResidualBlock():
            residual = _layer(writer, f"{path}/first", layer.first, images)
            residual = writer.add("Relu", f"{path}/first", [residual])
            residual = _layer(writer, f"{path}/second", layer.second, residual)
            shortcut = _layer(writer, f"{path}/shortcut", layer.shortcut, images)
            return writer.add("Relu", path, [writer.add("Add", path, [residual, shortcut])])
        case Align():
            return _align(writer, path, layer, images)
    raise TypeError(f"{path}: no ONNX is known for {type(layer).__name__}")


def _align(writer: GraphWriter, path: str, layer: Align, images: str) -> str:
    if layer.identity:
        return images
    if layer.missing:
        # One channel of zeros behind the others, for those that the layer before does not have.
        pads = writer.constant("one_channel_more", [0, 0, 0, 0, 0, 1, 0, 0])
        images = writer.add("Pad", path, [images, pads])
    return writer.add("Gather", path, [images, writer.constant(f"{path}/index", layer.index)], axis=1)
