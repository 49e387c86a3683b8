"""A task's baked body as nodes of a graph, in int8 (QDQ): convolutions and the sums between them.

Pixels are 8-bit already and are used as they are. Weights are quantised per row, to 7 bits, because older CPUs add two
products in 16 bits and would overflow with 8. Those of Sup are -1, 0 and 1 times a constant, so they lose nothing. The
range of every activation was recorded on the task's own images when it was learned. Linear layers, heads and distances
stay in floating point: they cost little, and small errors in them change decisions.
"""

from typing import NamedTuple

import numpy as np
import torch
from onnx import TensorProto
from torch import Tensor, nn

from export.graph.body_float import FloatBody, selection, tapped
from export.graph.writer import GraphWriter
from models.backbones.backbone import GlobalPool, Tap
from models.backbones.resnet import BakedResidualBlock
from models.baked import Align, BakedConv2d

LARGEST_WEIGHT = 63
LARGEST_BIAS = 2**30
"""Half of the range of 32 bits: the rest is for the sum that the bias is added to."""
STEPS = 255


class QuantizedTensor(NamedTuple):
    """A quantised tensor: value = scale * (number - zero)."""

    name: str
    scale: float
    zero: int


class QuantizedBody:
    """Convolutions on integers. Layers pass 8-bit tensors to each other, and every reader dequantises them."""

    def __init__(self, writer: GraphWriter, mean: float, std: float) -> None:
        self._writer = writer
        self._floats = FloatBody(writer, mean, std)
        # A pixel p stands for (p / 255 - mean) / std, so pixels are quantised already.
        self._pixels = (1 / (STEPS * std), round(STEPS * mean))
        self._ranges: dict[str, tuple[float, float]] = {}

    def pixels(self, pixels: str) -> str:
        return self._writer.add("Transpose", "pixels/channels_first", [pixels], perm=[0, 3, 1, 2])

    def ranges(self, path: str, recorded: dict[str, tuple[float, float]]) -> None:
        """Set the recorded ranges of a body's layers, before the body is written."""
        self._ranges |= {f"{path}/{name.replace('.', '/')}": extremes for name, extremes in recorded.items()}

    def depths(self, path: str, body: nn.Sequential, images: str, tap: Tap) -> list[str]:
        values: QuantizedTensor | str = QuantizedTensor(images, *self._pixels)
        for place, (name, stage) in enumerate(body.named_children()):
            values = self._layer(f"{path}/{name}", stage, values)
            if place == tap.stage:
                half_way = tapped(self._writer, f"{path}/tap", tap, self._real(f"{path}/tap", values))
        return [half_way, self._real(path, values)]

    def _real(self, path: str, values: QuantizedTensor | str) -> str:
        return self._float(path, values) if isinstance(values, QuantizedTensor) else values

    def _layer(self, path: str, layer: nn.Module, images: QuantizedTensor | str) -> QuantizedTensor | str:
        """Write one baked module on integers, or on floats if its input is the name of a float tensor."""
        match layer:
            case nn.Sequential():
                parts = list(layer.named_children())
                for place, (name, part) in enumerate(parts):
                    followed = place + 1 < len(parts) and isinstance(parts[place + 1][1], nn.ReLU)
                    if isinstance(part, BakedConv2d) and isinstance(images, QuantizedTensor):
                        images = self._conv(f"{path}/{name}", part, images, rectified=followed)
                    else:
                        images = self._layer(f"{path}/{name}", part, images)
                return images
            case _ if isinstance(images, str):
                return self._floats.layer(path, layer, images)
            case nn.ReLU():
                # Quantising to a range that starts at zero has the effect of a ReLU.
                return images
            case nn.MaxPool2d():
                return images._replace(name=self._floats.layer(path, layer, images.name))
            case nn.Flatten() | GlobalPool():
                return self._floats.layer(path, layer, self._float(path, images))
            case BakedResidualBlock():
                return self._residual(path, layer, images)
        raise TypeError(f"{path}: no int8 ONNX is known for {type(layer).__name__}")

    def _residual(self, path: str, layer: BakedResidualBlock, images: QuantizedTensor) -> QuantizedTensor:
        residual = self._conv(f"{path}/first", layer.first, images, rectified=True)
        residual = self._conv(f"{path}/second", layer.second, residual, rectified=False)
        if isinstance(layer.shortcut, BakedConv2d):
            shortcut = self._conv(f"{path}/shortcut", layer.shortcut, images, rectified=False)
        else:
            assert isinstance(layer.shortcut, Align)
            shortcut = self._align(f"{path}/shortcut", layer.shortcut, images)
        parts = [
            self._float(f"{path}/{name}", tensor) for name, tensor in (("residual", residual), ("skipped", shortcut))
        ]
        return self._quantized(path, self._writer.add("Add", path, parts), rectified=True)

    def _align(self, path: str, layer: Align, images: QuantizedTensor) -> QuantizedTensor:
        if layer.identity:
            return images
        writer = self._writer
        whole = writer.add_constant("Cast", f"{path}/whole", [selection(writer, path, layer)], to=TensorProto.INT8)
        weight = writer.add("DequantizeLinear", f"{path}/steps", [whole, writer.constant("one", 1.0)])
        made = writer.add("Conv", path, [self._float(f"{path}/in", images), weight])
        # The scale is that of the input, so every number passes unchanged.
        names = self._quantization(f"{path}/from", images.scale, images.zero)
        return images._replace(name=writer.add("QuantizeLinear", path, [made, *names]))

    def _conv(self, path: str, layer: BakedConv2d, images: QuantizedTensor, *, rectified: bool) -> QuantizedTensor:
        writer = self._writer
        least = torch.zeros(layer.out_channels, dtype=torch.float64)
        if layer.bias is not None:
            # A bias is a number of steps of inputs times weights, which must fit in 32 bits.
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
        """A layer's dequantised weights, and the step size of each row, which is at least `least`."""
        writer = self._writer
        if layer.ternary is None or (layer.ternary.scale < least).any():
            weight = layer.weight.detach()
            scale = (weight.abs().amax(dim=(1, 2, 3)) / LARGEST_WEIGHT).clamp(min=1e-12)
            scale = torch.maximum(scale, least.float())
            rows = torch.round(weight / scale.view(-1, 1, 1, 1)).to(torch.int8)
            whole = writer.constant(f"{path}/weight", rows)
            if layer.ternary is not None:
                # Not used here, but the file of the task's bits must be the same in every precision.
                writer.ternary(path, layer.ternary, layer.weight.shape)
        else:
            whole = writer.ternary(path, layer.ternary, layer.weight.shape)
            # Positive, since Sup's normalisation has no learned scale that could change the sign.
            scale = layer.ternary.scale
        step = writer.constant(f"{path}/weight_scale", scale)
        return writer.add("DequantizeLinear", f"{path}/weight", [whole, step], axis=0), scale

    def _quantized(self, path: str, values: str, *, rectified: bool) -> QuantizedTensor:
        """Quantise floats over the recorded range; a rectified one starts at zero."""
        low, high = self._ranges[path]
        low, high = 0.0 if rectified else min(low, 0.0), max(high, 1e-6)
        scale = (high - low) / STEPS
        zero = round(-low / scale)
        made = self._writer.add("QuantizeLinear", path, [values, *self._quantization(path, scale, zero)])
        return QuantizedTensor(made, scale, zero)

    def _float(self, path: str, tensor: QuantizedTensor) -> str:
        names = self._quantization(f"{path}/from", tensor.scale, tensor.zero)
        return self._writer.add("DequantizeLinear", path, [tensor.name, *names])

    def _quantization(self, path: str, scale: float, zero: int) -> list[str]:
        return [
            self._writer.constant(f"{path}/step", float(scale)),
            self._writer.constant(f"byte_{zero}", np.array(zero, dtype=np.uint8)),
        ]
