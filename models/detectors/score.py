"""The interface of an unknown score: how it is fitted, computed, and written as ONNX nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

from torch import Tensor, nn
from torch.nn import functional

Means = Mapping[str, Tensor]
"""Measurement -> its mean over the rotations, [n, columns]."""

SHORTEST = 1e-3
"""Features with a smaller norm have no direction: only rounding errors are left of them."""
FLOAT = 1
"""ONNX's number for float32, the `to` of a Cast."""


class Features(NamedTuple):
    """Live features of a task, [rotations, n, features]: half-way at the tap, and at the end of the body."""

    shallow: Tensor
    deep: Tensor


class GraphOps(Protocol):
    """Writes ONNX nodes for one task. Values are names of tensors; names of nodes are relative to the task."""

    def add(self, kind: str, name: str, inputs: Sequence[str], **attributes: Any) -> str:
        """A node; returns the name of its output."""
        ...

    def fitted(self, name: str, values: Tensor) -> str:
        """A fitted tensor [rotations, ...], of which the graph may use some rotations only, or a single number."""
        ...

    def constant(self, name: str, value: Sequence[int] | float) -> str:
        """A constant that all tasks share under this name, such as the axes of a reduction."""
        ...

    def fold(self, kind: str, name: str, inputs: Sequence[str], **attributes: Any) -> str:
        """A node whose inputs are all constant: onnxruntime computes it once, when it loads the graph."""
        ...

    def once(self, name: str, write: Callable[[], str]) -> str:
        """The output of `write`, which is called only if no other score has written `name` yet."""
        ...


class UnknownScore(nn.Module):
    """One unknown score of one task. Higher means more unknown.

    A score is computed in two steps. `measure` runs on each rotation of an image; its result is averaged over the
    rotations and stored in the checkpoint for the task's validation images, under the name of the score. `score` turns
    these means into the score of each class, or of the whole task. Every step has a twin that writes it as ONNX nodes.
    """

    fits_copies: ClassVar[bool] = True
    """Whether `fit` gets the slightly changed copies of the training images as well."""

    def __init__(self, name: str, classes: int) -> None:
        super().__init__()
        self.name = name
        self.classes = classes

    @property
    def needs(self) -> tuple[str, ...]:
        """The measurements that `score` reads: usually this score's own. All tasks have "logits", the calibrated ones.

        A score that does not need its own measurement has none.
        """
        return (self.name,)

    def fit(self, features: Features, local_classes: Tensor, logits: Tensor) -> None:
        """Fit to the task's training images: their features, classes [n] and calibrated logits [n, classes].

        What is fitted are buffers of the module; their shapes may change here.
        """

    def measure(self, features: Features) -> Tensor:
        """[rotations, n, columns], the same number of columns for any images."""
        raise NotImplementedError

    def score(self, means: Means) -> Tensor:
        """[n, classes], or [n, 1] for the whole task."""
        raise NotImplementedError

    def write_measure(self, ops: GraphOps, features: Mapping[str, str]) -> str:
        """`measure` as nodes; `features` are "shallow" and "deep"."""
        raise NotImplementedError

    def write_score(self, ops: GraphOps, means: Mapping[str, str]) -> str:
        """`score` as nodes."""
        raise NotImplementedError


def directions_of(features: Tensor) -> Tensor:
    """[rotations, n, features] -> the same, scaled to length 1."""
    return functional.normalize(features, dim=2, eps=SHORTEST)


def write_directions(ops: GraphOps, features: Mapping[str, str], depth: str) -> str:
    """`directions_of` as nodes."""

    def write() -> str:
        length = ops.add("ReduceL2", f"{depth}/length", [features[depth], ops.constant("last_axis", [-1])], keepdims=1)
        length = ops.add("Max", f"{depth}/length", [length, ops.constant("shortest", SHORTEST)])
        return ops.add("Div", f"{depth}/direction", [features[depth], length])

    return ops.once(f"{depth}/direction", write)


def write_squared_distances(ops: GraphOps, name: str, rows: str, means: Tensor) -> str:
    """[rotations, n, features] -> squared distances from means [rotations, columns, features], as nodes."""
    rows = ops.add("Unsqueeze", f"{name}/rows", [rows, ops.constant("class_axis", [2])])
    difference = ops.add("Sub", f"{name}/difference", [rows, ops.fitted(f"{name}/means", means[:, None])])
    return ops.add("ReduceSumSquare", f"{name}/squared", [difference, ops.constant("last_axis", [-1])], keepdims=0)
