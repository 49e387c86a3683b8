"""Writes the nodes and constants of an ONNX graph; large constants go into files next to it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnx.external_data_helper import set_external_data
from torch import Tensor

from models.baked import Ternary
from models.masks.supermask import pack_bits
from serving.bundle.layout import part_name

OPSET, IR_VERSION = 23, 10
"""The newest opset whose Cast, Reshape, Transpose and the like have CUDA kernels in onnxruntime.

onnxruntime also accepts 26, with the same fused nodes and bit-identical outputs on the CPU. On CUDA, a node without a
kernel for its opset silently falls back to the CPU, with a copy each way.
"""
ALIGNMENT = 64
PRODUCER = "openworld"
SHARED = "shared"
CONV_WEIGHT_AXES = (4, 1)
"""The number of axes of a convolution's weight and of its bias."""
BITS_OF_BYTES = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").astype(np.int8)


def installed(package: str) -> str:
    """The version of a package, whose build for GPUs may have a name of its own."""
    for name in (package, f"{package}-gpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "not installed as a package"


class PartFile:
    """A file of weights. If graphs of other precisions share it and it exists, it must be the same again."""

    def __init__(self, path: Path, *, common: bool) -> None:
        self._path = path
        self._again = common and path.exists()
        self._file = path.open("rb" if self._again else "wb")

    def append(self, content: bytes) -> int:
        """Append numbers; returns their offset."""
        self._put(bytes(-self._file.tell() % ALIGNMENT))
        start = self._file.tell()
        self._put(content)
        return start

    def _put(self, content: bytes) -> None:
        if not self._again:
            self._file.write(content)
        elif self._file.read(len(content)) != content:
            raise ValueError(f"{self._path}: a graph of another precision has other numbers there")

    def close(self) -> None:
        if self._again and self._file.read(1):
            raise ValueError(f"{self._path}: a graph of another precision has more numbers there")
        self._file.close()


class Branch(NamedTuple):
    """Nodes that run only if a condition holds, and the names of their outputs."""

    nodes: list[onnx.NodeProto]
    outputs: list[str]


class GraphWriter:
    """Writes one graph. Constants named `owner/...` are stored in the owner's files: task0, task1, ... or shared.

    Only the numbers of the bodies depend on the precision, and among them not the bits of masks. Everything else is in
    a file that the graphs of all precisions share.
    """

    def __init__(self, folder: Path, precision: str) -> None:
        self._folder = folder
        self._precision = precision
        self._nodes: list[onnx.NodeProto] = []
        self._open = self._nodes
        self._constants: dict[str, onnx.TensorProto] = {}
        self._files: dict[str, PartFile] = {}
        self._signs: dict[int, str] = {}
        self._made: set[str] = set()
        self._suffix = ""

    @contextmanager
    def branch(self, suffix: str) -> Iterator[list[onnx.NodeProto]]:
        """Nodes that are added inside belong to a branch and get a suffix; constants still belong to the graph."""
        self._open, self._suffix = [], f"@{suffix}"
        try:
            yield self._open
        finally:
            self._open, self._suffix = self._nodes, ""

    def choose(self, path: str, condition: str, then: Branch, otherwise: Branch) -> list[str]:
        """Run one of two branches; returns the names of its outputs."""
        names = [f"{path}/If/{number}" for number in range(len(then.outputs))]
        graphs = {}
        for key, chosen in (("then_branch", then), ("else_branch", otherwise)):
            values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in chosen.outputs]
            graphs[key] = helper.make_graph(self._with_own_weights(chosen.nodes), f"{path}/{key}", [], values)
        self._nodes.append(helper.make_node("If", [condition], names, name=f"{path}/If", **graphs))
        return names

    def _with_own_weights(self, nodes: Sequence[onnx.NodeProto]) -> list[onnx.NodeProto]:
        """The same nodes, with weights of their own for the convolutions.

        onnxruntime gives a convolution its fast memory layout only if the weights belong to the graph that it is in.
        A reshape to the same shape is computed when the graph is loaded, and its result belongs to the branch.
        """
        own = []
        for node in nodes:
            if node.op_type == "Conv":
                for place, (name, axes) in enumerate(zip(node.input[1:], CONV_WEIGHT_AXES, strict=False), start=1):
                    if name in self._constants or name in self._made:
                        # A zero keeps the length of an axis.
                        same = self.constant(f"same_{axes}_axes", [0] * axes)
                        node.input[place] = f"{node.name}/own{place}"
                        reshape = helper.make_node("Reshape", [name, same], [node.input[place]], name=node.input[place])
                        own.append(reshape)
            own.append(node)
        return own

    def add(self, kind: str, path: str, inputs: Sequence[str], *, output: str | None = None, **attributes: Any) -> str:
        """Add a node named path/kind; returns the name of its output."""
        name = f"{path}/{kind}{self._suffix}"
        output = output or name
        self._open.append(helper.make_node(kind, list(inputs), [output], name=name, **attributes))
        return output

    def add_many(self, kind: str, path: str, inputs: Sequence[str], outputs: int, **attributes: Any) -> list[str]:
        """Add a node with several outputs; returns their names."""
        name = f"{path}/{kind}{self._suffix}"
        names = [f"{name}/{number}" for number in range(outputs)]
        self._open.append(helper.make_node(kind, list(inputs), names, name=name, **attributes))
        return names

    def add_constant(self, kind: str, path: str, inputs: Sequence[str], **attributes: Any) -> str:
        """Add a node on constants only, once per name: onnxruntime computes it when it loads the graph."""
        name = f"{path}/{kind}"
        if name not in self._made:
            self._made.add(name)
            self._nodes.append(helper.make_node(kind, list(inputs), [name], name=name, **attributes))
        return name

    def constant(self, name: str, value: Tensor | NDArray[Any] | Sequence[int] | float) -> str:
        """Add a named tensor; numbers become float32, sequences of integers int64."""
        if name in self._constants:
            return name
        if isinstance(value, Tensor):
            array: NDArray[Any] = value.detach().cpu().numpy()
        elif isinstance(value, float):
            array = np.array(value, dtype=np.float32)
        else:
            array = np.asarray(value)
        array = np.ascontiguousarray(array).reshape(array.shape)
        owner = name.partition("/")[0] if "/" in name else ""
        # Shapes and indices are stored in the graph, weights are not.
        inline = not owner or array.dtype == np.int64
        self._constants[name] = numpy_helper.from_array(array, name) if inline else self._stored(owner, name, array)
        return name

    def _stored(self, owner: str, name: str, array: NDArray[Any]) -> onnx.TensorProto:
        common = "/body/" not in name or owner == SHARED or name.endswith("/packed")
        location = part_name(owner, None if common else self._precision)
        if location not in self._files:
            self._files[location] = PartFile(self._folder / location, common=common)
        start = self._files[location].append(array.tobytes())
        tensor = TensorProto(name=name, data_type=helper.np_dtype_to_tensor_dtype(array.dtype), dims=array.shape)
        # onnx marks a tensor as external only if it has raw data.
        tensor.raw_data = b""
        set_external_data(tensor, location, offset=start, length=array.nbytes)
        tensor.ClearField("raw_data")
        return tensor

    def ternary(self, path: str, weights: Ternary, shape: torch.Size) -> str:
        """Weights of -1, 0 and 1, int8, from bits: the layer's signs, stored once for all tasks, and a mask.

        onnxruntime keeps all intermediate results in memory while it loads a graph, so there are few steps, on bytes.
        """
        signs = self._signs.get(weights.signs.data_ptr())
        if signs is None:
            layer = f"{SHARED}/{path.partition('/')[2]}"
            signs = self._signs[weights.signs.data_ptr()] = self._signed(layer, weights.signs, shape)
        mask = self._bits(f"{path}/mask", weights.mask, shape)
        return self.add_constant("BitwiseAnd", f"{path}/kept", [signs, mask])

    def scaled_ternary(self, path: str, weights: Ternary, shape: torch.Size) -> str:
        """`ternary` times the scale of each row, float32."""
        kept = self.add_constant("Cast", f"{path}/float", [self.ternary(path, weights, shape)], to=TensorProto.FLOAT)
        rows = self.constant(f"{path}/scale", weights.scale.view(-1, *[1] * (len(shape) - 1)))
        return self.add_constant("Mul", f"{path}/weight", [kept, rows])

    def _signed(self, path: str, signs: Tensor, shape: torch.Size) -> str:
        """1 where a bit is set and -1 elsewhere."""
        positive = self._bits(f"{path}/signs", signs, shape)
        negative = self.add_constant("BitwiseNot", f"{path}/negative", [positive])
        one = self.constant("one_byte", np.array(1, dtype=np.int8))
        return self.add_constant("BitwiseOr", f"{path}/signed", [negative, one])

    def _bits(self, path: str, mask: Tensor, shape: torch.Size) -> str:
        """Packed bits, lowest first, to int8 of a shape: -1 (all its bits set) where the bit is set, 0 elsewhere."""
        packed = self.constant(f"{path}/packed", pack_bits(mask))
        numbers = self.add_constant("Cast", f"{path}/number", [packed], to=TensorProto.INT32)
        table = self.constant(f"{SHARED}/bits_of_bytes", -BITS_OF_BYTES)
        bits = self.add_constant("Gather", f"{path}/bits", [table, numbers], axis=0)
        if mask.numel() % 8:
            flat = self.add_constant("Reshape", f"{path}/flat", [bits, self.constant("flat", [-1])])
            ends = [self.constant(f"{path}/{key}", [number]) for key, number in (("from", 0), ("to", mask.numel()))]
            bits = self.add_constant("Slice", f"{path}/cut", [flat, *ends])
        return self.add_constant("Reshape", f"{path}/shaped", [bits, self.constant(f"{path}/shape", list(shape))])

    def model(
        self,
        inputs: Sequence[onnx.ValueInfoProto],
        outputs: Sequence[onnx.ValueInfoProto],
        metadata: dict[str, str] | None = None,
    ) -> onnx.ModelProto:
        """The graph as it is so far."""
        graph = helper.make_graph(self._nodes, "openworld", inputs, outputs, list(self._constants.values()))
        model = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", OPSET)],
            ir_version=IR_VERSION,
            producer_name=PRODUCER,
            producer_version=installed(PRODUCER),
        )
        helper.set_model_props(model, metadata or {})
        return model

    def finish(
        self,
        path: Path,
        inputs: Sequence[onnx.ValueInfoProto],
        outputs: Sequence[onnx.ValueInfoProto],
        metadata: dict[str, str],
    ) -> None:
        """Write the graph and check it, together with its files of weights."""
        for file in self._files.values():
            file.close()
        path.write_bytes(self.model(inputs, outputs, metadata).SerializeToString(deterministic=True))
        onnx.checker.check_model(path, full_check=True)
