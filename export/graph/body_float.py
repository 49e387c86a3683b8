"""A task's baked body as nodes of a graph, in floating point: fp32, or fp16 for GPUs."""

from typing import Protocol

import numpy as np
from onnx import TensorProto
from torch import Tensor, nn

from export.graph.writer import GraphWriter
from models.backbones.backbone import GlobalPool, Tap
from models.backbones.resnet import BakedResidualBlock
from models.baked import Align, BakedConv2d, BakedLinear


class Body(Protocol):
    """Writes bodies in one precision."""

    def pixels(self, pixels: str) -> str:
        """Write the part before all bodies: uint8 [n, height, width, channels] to the input of a body."""

    def depths(self, path: str, body: nn.Sequential, images: str, tap: Tap) -> list[str]:
        """Write a task's body; returns its features at the tap and at its end, float32 [n, live features]."""


class FloatBody:
    """Plain convolutions and linear layers."""

    def __init__(self, writer: GraphWriter, mean: float, std: float, *, half: bool = False) -> None:
        self._writer = writer
        self._mean = mean
        self._std = std
        self._half = half

    def pixels(self, pixels: str) -> str:
        writer = self._writer
        images = writer.add("Transpose", "pixels/channels_first", [pixels], perm=[0, 3, 1, 2])
        images = writer.add("Cast", "pixels/float", [images], to=TensorProto.FLOAT)
        images = writer.add("Div", "pixels/unit", [images, writer.constant("white", 255.0)])
        images = writer.add("Sub", "pixels/centred", [images, writer.constant("mean", float(self._mean))])
        images = writer.add("Div", "pixels/normal", [images, writer.constant("std", float(self._std))])
        return writer.add("Cast", "pixels/half", [images], to=TensorProto.FLOAT16) if self._half else images

    def depths(self, path: str, body: nn.Sequential, images: str, tap: Tap) -> list[str]:
        for place, (name, stage) in enumerate(body.named_children()):
            images = self.layer(f"{path}/{name}", stage, images)
            if place == tap.stage:
                half_way = tapped(self._writer, f"{path}/tap", tap, images)
        if not self._half:
            return [half_way, images]
        depths = (("shallow", half_way), ("deep", images))
        return [self._writer.add("Cast", f"{path}/{depth}", [flat], to=TensorProto.FLOAT) for depth, flat in depths]

    def layer(self, path: str, layer: nn.Module, images: str) -> str:
        """Write one baked module. Any other kind of module is an error."""
        writer = self._writer
        match layer:
            case nn.Sequential():
                for name, part in layer.named_children():
                    images = self.layer(f"{path}/{name}", part, images)
                return images
            case BakedConv2d():
                padding = [int(side) for side in layer.padding] * 2
                inputs = [images, *self._weights(path, layer)]
                return writer.add("Conv", path, inputs, strides=list(layer.stride), pads=padding)
            case BakedLinear():
                return writer.add("Gemm", path, [images, *self._weights(path, layer)], transB=1)
            case nn.ReLU():
                return writer.add("Relu", path, [images])
            case nn.MaxPool2d():
                return writer.add("MaxPool", path, [images], kernel_shape=[2, 2], strides=[2, 2])
            case nn.Flatten():
                return writer.add("Flatten", path, [images])
            case GlobalPool():
                return writer.add("ReduceMean", path, [images, writer.constant("image_axes", [2, 3])], keepdims=0)
            case BakedResidualBlock():
                residual = self.layer(f"{path}/first", layer.first, images)
                residual = writer.add("Relu", f"{path}/first", [residual])
                residual = self.layer(f"{path}/second", layer.second, residual)
                shortcut = self.layer(f"{path}/shortcut", layer.shortcut, images)
                return writer.add("Relu", path, [writer.add("Add", path, [residual, shortcut])])
            case Align():
                return self._align(path, layer, images)
        raise TypeError(f"{path}: no ONNX is known for {type(layer).__name__}")

    def _align(self, path: str, layer: Align, images: str) -> str:
        if layer.identity:
            return images
        weight = selection(self._writer, path, layer)
        return self._writer.add("Conv", path, [images, self._halved(path, weight)])

    def _weights(self, path: str, layer: BakedConv2d | BakedLinear) -> list[str]:
        writer = self._writer
        if layer.ternary is None:
            names = [writer.constant(f"{path}/weight", self._stored(layer.weight))]
        else:
            names = [self._halved(path, writer.scaled_ternary(path, layer.ternary, layer.weight.shape))]
        if layer.bias is not None:
            names.append(writer.constant(f"{path}/bias", self._stored(layer.bias)))
        return names

    def _halved(self, path: str, weight: str) -> str:
        if not self._half:
            return weight
        return self._writer.add_constant("Cast", f"{path}/half", [weight], to=TensorProto.FLOAT16)

    def _stored(self, values: Tensor) -> Tensor:
        return values.half() if self._half else values


def tapped(writer: GraphWriter, path: str, tap: Tap, maps: str) -> str:
    """Tap.read as nodes: feature maps [n, channels, height, width] -> [n, features]."""
    if tap.pool > 1:
        sides = [tap.pool, tap.pool]
        maps = writer.add("AveragePool", path, [maps], kernel_shape=sides, strides=sides)
    return writer.add("Flatten", path, [maps])


def selection(writer: GraphWriter, path: str, layer: Align) -> str:
    """Weights [after, before, 1, 1] of 0 and 1: an alignment as a convolution.

    onnxruntime gives convolutions a memory layout of their own, which a Gather between two of them would undo and redo,
    and it fuses the sum of two convolutions into the second.
    """
    index = writer.constant(f"{path}/index", layer.index.cpu().numpy().astype(np.int64))
    depth = writer.constant(f"{path}/channels", [layer.channels])
    # A channel that the layer before does not have has the index one past the last, where OneHot gives zeros only.
    off_on = writer.constant("off_on", np.array([0, 1], dtype=np.float32))
    rows = writer.add_constant("OneHot", f"{path}/rows", [index, depth, off_on])
    return writer.add_constant("Unsqueeze", f"{path}/weight", [rows, writer.constant("kernel_axes", [2, 3])])
