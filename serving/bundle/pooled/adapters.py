"""A task's adapter: a few small layers on the encoded vector, learned when the task was and never changed again.

Statistics that are pooled over all tasks decide which task an image belongs to. Within a task, its adapter sharpens
them:

    log p(c) = log p(task) + log normalised[p_pooled(c | task)^(1 - w) p_adapter(c | task)^w]

so that adapters change neither the probability of a task nor whether an image is known. The weight w is one number per
run, chosen on validation images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating[Any]]
Floats = NDArray[np.float32]
Arrays = Mapping[str, NDArray[Any]]

PREFIX = "adapter."
"""How the names of an adapter's arrays begin in the file of its task."""


class Layer(NamedTuple):
    """relu(weight @ x + bias)."""

    weight: Floats  # [units, inputs]
    bias: Floats  # [units]


@dataclass(frozen=True)
class Adapter:
    """The layers of one task on its live units, with norms folded in, and its linear head.

    Weights are held as a file stores them: in 16 bits, or as signs and masks if all weights of a row have one size.
    """

    inputs: tuple[Floats, Floats]
    """Factors and offsets [dim] that standardise a vector."""
    layers: tuple[Layer, ...]
    heads: Floats  # [rotations, units, classes]
    biases: Floats  # [rotations, classes]
    scale: float
    """Multiplies the logits, so that their softmax is calibrated."""

    @classmethod
    def of(
        cls,
        inputs: tuple[Array, Array],
        layers: Sequence[tuple[Array, Array]],
        heads: Array,
        biases: Array,
        scale: float,
    ) -> Adapter:
        """The adapter with its weights rounded as a file stores them."""
        factors, offsets = (each.astype(np.float32) for each in inputs)
        rounded = tuple(Layer(_rounded(weight), bias.astype(np.float32)) for weight, bias in layers)
        return cls((factors, offsets), rounded, _rounded(heads), biases.astype(np.float32), float(scale))

    @property
    def classes(self) -> int:
        return int(self.heads.shape[2])

    @property
    def rotations(self) -> int:
        return len(self.heads)

    @property
    def numbers(self) -> int:
        """How many numbers it has."""
        return sum(each.size for each in self._arrays)

    def upright(self) -> Adapter:
        """The part that reads the upright image only."""
        return Adapter(self.inputs, self.layers, self.heads[:1], self.biases[:1], self.scale)

    def of_classes(self, columns: NDArray[np.int64]) -> Adapter:
        """The adapter of some of the classes."""
        return Adapter(self.inputs, self.layers, self.heads[:, :, columns], self.biases[:, columns], self.scale)

    def logits(self, encoded: Array) -> Array:
        """Calibrated logits [n, classes] of vectors [n, rotations, dim], the mean over the rotations.

        Rows are computed one by one, so that an answer does not depend on the other images of its batch.
        """
        allowed = self.rotations, len(self.inputs[0])
        if encoded.ndim != 3 or encoded.shape[1:] != allowed:
            raise ValueError(f"adapter: vectors have shape {encoded.shape}; allowed: [n, {allowed[0]}, {allowed[1]}]")
        rows = np.ascontiguousarray(encoded, dtype=np.float32)
        logits = np.empty((len(rows), self.classes))
        for number, views in enumerate(rows):
            logits[number] = self._row(views)
        return logits

    def _row(self, views: Floats) -> Array:
        total = np.zeros(self.classes)
        for view, head, bias in zip(views, self._transposed, self.biases, strict=True):
            hidden = view * self.inputs[0] + self.inputs[1]
            for layer in self.layers:
                hidden = np.maximum(layer.weight @ hidden + layer.bias, 0)
            total += head @ hidden + bias
        return total * (self.scale / self.rotations)

    @cached_property
    def _transposed(self) -> Floats:
        return np.ascontiguousarray(self.heads.transpose(0, 2, 1))

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Everything as arrays, for the file of the task."""
        arrays: dict[str, NDArray[Any]] = {
            f"{PREFIX}{name}": each for name, each in zip(("factors", "offsets"), self.inputs, strict=True)
        }
        for number, layer in enumerate(self.layers):
            arrays |= _stored(f"{PREFIX}layer{number}", layer.weight)
            arrays[f"{PREFIX}layer{number}.bias"] = layer.bias
        arrays[f"{PREFIX}heads"] = self.heads.astype(np.float16)
        arrays[f"{PREFIX}biases"] = self.biases
        arrays[f"{PREFIX}scale"] = np.array([self.scale])
        return arrays

    @classmethod
    def from_arrays(cls, arrays: Arrays) -> Adapter | None:
        """The adapter of `to_arrays`, the same to the bit; None if the file has none. Raises a KeyError or a ValueError
        if it is not complete."""
        if f"{PREFIX}scale" not in arrays:
            return None
        layers: list[Layer] = []
        while f"{PREFIX}layer{len(layers)}.bias" in arrays:
            name = f"{PREFIX}layer{len(layers)}"
            layers.append(Layer(_loaded(arrays, name), arrays[f"{name}.bias"].astype(np.float32)))
        names = ("factors", "offsets", "heads", "biases")
        factors, offsets, heads, biases = (arrays[PREFIX + name].astype(np.float32) for name in names)
        adapter = cls((factors, offsets), tuple(layers), heads, biases, float(arrays[f"{PREFIX}scale"][0]))
        adapter.check()
        return adapter

    def check(self) -> None:
        """Raise a ValueError if the shapes do not fit each other, or a number is not finite."""
        if not self.layers or self.heads.ndim != 3 or self.biases.shape != (self.rotations, self.classes):
            raise ValueError(
                f"adapter: {len(self.layers)} layers, heads {self.heads.shape}, biases {self.biases.shape}"
            )
        sizes = [len(self.inputs[0]), *(len(layer.weight) for layer in self.layers)]
        wanted = [*(layer.weight.shape[1] for layer in self.layers), self.heads.shape[1]]
        if wanted != sizes or any(len(bias) != len(weight) for weight, bias in (*self.layers, self.inputs)):
            raise ValueError(f"adapter: layers of {sizes} units before inputs of {wanted}")
        if not all(np.isfinite(each).all() for each in self._arrays):
            raise ValueError("adapter: a number is not finite")

    @property
    def _arrays(self) -> list[NDArray[Any]]:
        layers = [each for layer in self.layers for each in layer]
        return [*self.inputs, *layers, self.heads, self.biases, np.array([self.scale])]


def sharpened(
    pooled: Array, columns: Sequence[slice | NDArray[np.int64]], adapted: Sequence[Array], weight: float
) -> Floats:
    """Logits [n, classes] whose softmax is p(c) as above, from logits of pooled statistics and adapters' own logits.

    `columns` and `adapted` [n, classes of the task] are of the tasks in order. The last tasks may have no adapter;
    their logits stay as they are.
    """
    result = pooled.astype(np.float32)
    rows = pooled.astype(np.float64)
    for place, own in zip(columns, adapted, strict=False):
        part = rows[:, place]
        of_task = _log_sum(part)
        mixed = (1 - weight) * (part - of_task) + weight * (own - _log_sum(own))
        result[:, place] = of_task + mixed - _log_sum(mixed)
    return result


def _log_sum(values: Array) -> Array:
    largest = values.max(axis=1, keepdims=True)
    total: Array = largest + np.log(np.exp(values - largest).sum(axis=1, keepdims=True))
    return total


def _rounded(weight: Array) -> Floats:
    """To 16 bits; rows of one size and its negative get that size in 32 bits."""
    plain = np.ascontiguousarray(weight, dtype=np.float32)
    return plain if _row_sizes(plain) is not None else plain.astype(np.float16).astype(np.float32)


def _row_sizes(weight: Floats) -> Floats | None:
    """s of each row of a matrix whose rows have only -s, 0 and s; None if it is another one."""
    if weight.ndim != 2 or weight.shape[1] < 2:
        return None
    sizes: Floats = np.abs(weight).max(axis=1)
    return sizes if ((weight == 0) | (np.abs(weight) == sizes[:, None])).all() else None


def _stored(name: str, weight: Floats) -> dict[str, NDArray[Any]]:
    sizes = _row_sizes(weight)
    if sizes is None:
        return {f"{name}.weight": weight.astype(np.float16)}
    return {
        f"{name}.sizes": sizes,
        f"{name}.inputs": np.array([weight.shape[1]]),
        f"{name}.kept": np.packbits(weight != 0),
        f"{name}.negative": np.packbits(weight < 0),
    }


def _loaded(arrays: Arrays, name: str) -> Floats:
    if f"{name}.weight" in arrays:
        return arrays[f"{name}.weight"].astype(np.float32)
    sizes, inputs = arrays[f"{name}.sizes"].astype(np.float32), int(arrays[f"{name}.inputs"][0])
    count = len(sizes) * inputs
    bits = [np.unpackbits(arrays[f"{name}.{part}"], count=count) for part in ("kept", "negative")]
    kept, negative = (each.reshape(len(sizes), inputs).astype(np.float32) for each in bits)
    return np.ascontiguousarray(sizes[:, None] * kept * (1 - 2 * negative))
