"""A task's baked body as nodes of a graph, in 8-bit whole numbers (QDQ): convolutions and the sums between them.

Pixels are 8-bit already and go in as they are. Weights are quantised by row, to 7 bits, because older CPUs add two
products in 16 bits and would overflow with 8; those of Sup are -1, 0 and 1 times a constant, so nothing is lost. The
range of every activation is the one that was recorded on the task's own images when it was learned. Linear layers,
heads and distances stay in floating point: they cost little and decide much.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from onnx import TensorProto
from torch import Tensor, nn

from export.layers import selection, tapped
from export.writer import GraphWriter
from models.baked import Align, BakedConv2d, BakedLinear
from models.resnet import BakedResidualBlock, GlobalPool
from models.taps import Tap

LARGEST_WEIGHT = 63
LARGEST_BIAS = 2**30
"""Half of what 32 bits hold: the rest is for the sum that it is added to."""
STEPS = 255


class Edge(NamedTuple):
    """A quantised tensor: value = scale * (number - zero)."""

    name: str
    scale: float
    zero: int


class QuantizedBody:
    """Convolutions on whole numbers. Images pass between layers as 8-bit tensors; each reader dequantises them."""

    def __init__(self, writer: GraphWriter, mean: float, std: float) -> None:
        self._writer = writer
        # A pixel p stands for (p / 255 - mean) / std, so pixels are quantised already.
        self._pixels = (1 / (STEPS * std), round(STEPS * mean))
        self._ranges: dict[str, tuple[float, float]] = {}

    def pixels(self, pixels: str) -> str:
        return self._writer.add("Transpose", "pixels/channels_first", [pixels], perm=[0, 3, 1, 2])

    def ranges(self, path: str, recorded: dict[str, tuple[float, float]]) -> None:
        """Tell the recorded extremes of a body's layers, before the body is written."""
        self._ranges |= {f"{path}/{name.replace('.', '/')}": extremes for name, extremes in recorded.items()}

    def depths(self, path: str, body: nn.Sequential, images: str, tap: Tap) -> list[str]:
        values: Edge | str = Edge(images, *self._pixels)
        for place, (name, stage) in enumerate(body.named_children()):
            values = self._layer(f"{path}/{name}", stage, values)
            if place == tap.stage:
                half_way = tapped(self._writer, f"{path}/tap", tap, self._real(f"{path}/tap", values))
        return [half_way, self._real(path, values)]

    def _real(self, path: str, values: Edge | str) -> str:
        return self._float(path, values) if isinstance(values, Edge) else values

    def _layer(self, path: str, layer: nn.Module, images: Edge | str) -> Edge | str:
        """Write one baked module on whole numbers, or on floats where its input is a name."""
        writer = self._writer
        match layer:
            case nn.Sequential():
                parts = list(layer.named_children())
                for place, (name, part) in enumerate(parts):
                    followed = place + 1 < len(parts) and isinstance(parts[place + 1][1], nn.ReLU)
                    if isinstance(part, BakedConv2d) and isinstance(images, Edge):
                        images = self._conv(f"{path}/{name}", part, images, rectified=followed)
                    else:
                        images = self._layer(f"{path}/{name}", part, images)
                return images
            case nn.ReLU():
                # Whole numbers that start at zero have been rectified by being quantised.
                return images if isinstance(images, Edge) else writer.add("Relu", path, [images])
            case nn.MaxPool2d() if isinstance(images, Edge):
                pooled = writer.add("MaxPool", path, [images.name], kernel_shape=[2, 2], strides=[2, 2])
                return images._replace(name=pooled)
            case nn.Flatten() if isinstance(images, Edge):
                return writer.add("Flatten", path, [self._float(path, images)])
            case GlobalPool() if isinstance(images, Edge):
                axes = writer.constant("image_axes", [2, 3])
                return writer.add("ReduceMean", path, [self._float(path, images), axes], keepdims=0)
            case BakedLinear() if isinstance(images, str):
                return writer.add("Gemm", path, [images, *self._linear_weights(path, layer)], transB=1)
            case BakedResidualBlock() if isinstance(images, Edge):
                return self._residual(path, layer, images)
        raise TypeError(f"{path}: no whole-number ONNX is known for {type(layer).__name__}")

    def _residual(self, path: str, layer: BakedResidualBlock, images: Edge) -> Edge:
        residual = self._conv(f"{path}/first", layer.first, images, rectified=True)
        residual = self._conv(f"{path}/second", layer.second, residual, rectified=False)
        if isinstance(layer.shortcut, BakedConv2d):
            shortcut = self._conv(f"{path}/shortcut", layer.shortcut, images, rectified=False)
        else:
            assert isinstance(layer.shortcut, Align)
            shortcut = self._align(f"{path}/shortcut", layer.shortcut, images)
        parts = [self._float(f"{path}/{name}", edge) for name, edge in (("residual", residual), ("skipped", shortcut))]
        return self._quantized(path, self._writer.add("Add", path, parts), rectified=True)

    def _align(self, path: str, layer: Align, images: Edge) -> Edge:
        if layer.identity:
            return images
        writer = self._writer
        whole = writer.add_constant("Cast", f"{path}/whole", [selection(writer, path, layer)], to=TensorProto.INT8)
        weight = writer.add("DequantizeLinear", f"{path}/steps", [whole, writer.constant("one", 1.0)])
        made = writer.add("Conv", path, [self._float(f"{path}/in", images), weight])
        # The same steps as before it, so every number passes as it is.
        names = self._quantization(f"{path}/from", images.scale, images.zero)
        return images._replace(name=writer.add("QuantizeLinear", path, [made, *names]))

    def _conv(self, path: str, layer: BakedConv2d, images: Edge, *, rectified: bool) -> Edge:
        writer = self._writer
        least = torch.zeros(layer.out_channels, dtype=torch.float64)
        if layer.bias is not None:
            # A bias is counted in steps of pixels times weights, and so many of them must fit in 32 bits.
            least = layer.bias.detach().double().abs() / (images.scale * LARGEST_BIAS)
        weight, scale = self._weight(path, layer, least)
        inputs = [self._float(f"{path}/in", images), weight]
        if layer.bias is not None:
            steps = scale.double() * images.scale
            whole = torch.round(layer.bias.detach().double() / steps).to(torch.int32)
            names = [writer.constant(f"{path}/bias", whole), writer.constant(f"{path}/bias_scale", steps.float())]
            inputs.append(writer.add("DequantizeLinear", f"{path}/bias", names, axis=0))
        padding = [int(side) for side in layer.padding] * 2
        made = writer.add("Conv", path, inputs, strides=list(layer.stride), pads=padding)
        return self._quantized(path, made, rectified=rectified)

    def _weight(self, path: str, layer: BakedConv2d, least: Tensor) -> tuple[str, Tensor]:
        """A layer's dequantised weights, and the size of a step in each row, which is at least so large."""
        writer = self._writer
        if layer.ternary is None or (layer.ternary.scale < least).any():
            weight = layer.weight.detach()
            scale = (weight.abs().amax(dim=(1, 2, 3)) / LARGEST_WEIGHT).clamp(min=1e-12)
            scale = torch.maximum(scale, least.float())
            rows = torch.round(weight / scale.view(-1, 1, 1, 1)).to(torch.int8)
            whole = writer.constant(f"{path}/weight", rows)
            if layer.ternary is not None:
                # Not read here, but the file of the task's bits is the same in every precision.
                writer.ternary(path, layer.ternary, layer.weight.shape)
        else:
            whole = writer.ternary(path, layer.ternary, layer.weight.shape)
            # Positive, since Sup's normalisation has no scale of its own to turn the sign.
            scale = layer.ternary.scale
        step = writer.constant(f"{path}/weight_scale", scale)
        return writer.add("DequantizeLinear", f"{path}/weight", [whole, step], axis=0), scale

    def _linear_weights(self, path: str, layer: BakedLinear) -> list[str]:
        writer = self._writer
        if layer.ternary is None:
            names = [writer.constant(f"{path}/weight", layer.weight)]
        else:
            names = [writer.scaled_ternary(path, layer.ternary, layer.weight.shape)]
        if layer.bias is not None:
            names.append(writer.constant(f"{path}/bias", layer.bias))
        return names

    def _quantized(self, path: str, values: str, *, rectified: bool) -> Edge:
        """Floats to whole numbers over the recorded range; a rectified one starts at zero."""
        low, high = self._ranges[path]
        low, high = 0.0 if rectified else min(low, 0.0), max(high, 1e-6)
        scale = (high - low) / STEPS
        zero = round(-low / scale)
        names = [*self._quantization(path, scale, zero)]
        return Edge(self._writer.add("QuantizeLinear", path, [values, *names]), scale, zero)

    def _float(self, path: str, edge: Edge) -> str:
        names = self._quantization(f"{path}/from", edge.scale, edge.zero)
        return self._writer.add("DequantizeLinear", path, [edge.name, *names])

    def _quantization(self, path: str, scale: float, zero: int) -> list[str]:
        return [
            self._writer.constant(f"{path}/step", float(scale)),
            self._writer.constant(f"byte_{zero}", np.array(zero, dtype=np.uint8)),
        ]
