"""A trunk and what identifies it. Importing this imports neither torch nor onnx."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from models.suggest import unknown_name
from models.trunks import TRUNKS

INPUT, OUTPUT = "pixels", "encoded"
LEAST_SIZE, MOST_SIZE = 32, 1024
"""Allowed sides of the images, in pixels."""
OWN_WEIGHTS = "trunk.safetensors"
"""The file of a run with the weights of a trunk that was learned from its images."""


class TrunkError(Exception):
    """A trunk that cannot be opened; the message has the reason and what to do."""


@dataclass(frozen=True)
class TrunkSpec:
    """What identifies a trunk, and the shapes of its graph. A run stores this, and never the weights."""

    name: str
    sha256: str
    """The checksum of the weights."""
    size: int
    """Images are uint8 [size, size, 3]."""
    depths: tuple[int, ...]
    """The widths of the parts of an encoded vector, each from another depth of the network."""
    options: dict[str, str] = field(default_factory=dict)
    """What else the graph depends on, such as the mean and std of the pixels; empty for most trunks."""

    def __post_init__(self) -> None:
        if not LEAST_SIZE <= self.size <= MOST_SIZE:
            raise ValueError(f"size of trunk {self.name} is {self.size}; allowed: {LEAST_SIZE} to {MOST_SIZE} pixels")
        if not self.depths or min(self.depths) < 1:
            raise ValueError(f"depths of trunk {self.name} are {self.depths}; allowed: widths of 1 or more")

    @property
    def dim(self) -> int:
        """How many numbers an encoded vector has."""
        return sum(self.depths)

    @property
    def public_name(self) -> str:
        """The name for others, without the folder of a file."""
        kind, colon, argument = self.name.partition(":")
        return f"{kind}{colon}{Path(argument).name}" if kind == "onnx" else self.name


class Probe(NamedTuple):
    """Images and the vectors that the network of a trunk computes from them, before it became a graph."""

    pixels: NDArray[np.uint8]
    encoded: NDArray[np.float32]


@dataclass(frozen=True)
class Trunk:
    """A spec with its graph: `pixels`, uint8 [n, size, size, 3] -> `encoded`, float32 [n, dim].

    Each part of `encoded` has the length 1 / sqrt(number of parts), so a vector has length 1.
    """

    spec: TrunkSpec
    model: bytes
    """A serialised ONNX model, weights included."""
    notes: tuple[str, ...] = ()
    """What a user should know about it, such as how its pixels are normalised."""
    probe: Probe | None = None
    """What the graph must compute, if the network was exported; `training.data.encoder` compares."""
    weights: bytes | None = None
    """A safetensors file that the run must keep, for a trunk that was learned from its images."""

    @cached_property
    def digest(self) -> str:
        """The sha256 of the graph: it changes with the weights and with everything that is computed from them."""
        return hashlib.sha256(self.model).hexdigest()


@dataclass(frozen=True)
class TrunkRequest:
    """What a user asks for."""

    name: str
    size: int | None = None
    """The side of the images; None: the one that the network was trained for."""
    weights: Path | None = None
    """A file of weights that replaces the published ones."""
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """The name, or what is before its colon."""
        return self.name.partition(":")[0]

    @property
    def argument(self) -> str:
        """What is after the colon of the name."""
        return self.name.partition(":")[2]

    def check_options(self, *allowed: str) -> None:
        """Raise a TrunkError if an option has another name."""
        for name in self.options:
            if not allowed:
                raise TrunkError(f"trunk {self.name} has no options; got {name}={self.options[name]}")
            if name not in allowed:
                raise TrunkError(unknown_name(f"option of trunk {self.name}", name, allowed))


def open_trunk(
    name: str,
    *,
    size: int | None = None,
    weights: str | Path | None = None,
    options: Mapping[str, str] | None = None,
) -> Trunk:
    """Open a trunk by its name; raises a TrunkError with what is allowed."""
    request = TrunkRequest(name, size, None if weights is None else Path(weights), dict(options or {}))
    form = next((form for form in TRUNKS if form.partition(":")[0] == request.kind), None)
    if form is None or (":" in form) != bool(request.argument):
        raise TrunkError(unknown_name("trunk", name, TRUNKS))
    if size is not None and not LEAST_SIZE <= size <= MOST_SIZE:
        raise TrunkError(f"trunk {name}: size is {size}; allowed: {LEAST_SIZE} to {MOST_SIZE} pixels")
    module, _, function = TRUNKS[form].partition(":")
    opener: Callable[[TrunkRequest], Trunk] = getattr(importlib.import_module(module), function)
    try:
        return opener(request)
    except ValueError as error:
        # A spec that checks itself, such as the size that a network was trained for.
        raise TrunkError(f"trunk {name}: {error}") from error


def reopen(spec: TrunkSpec, *, weights: str | Path | None = None, run: Path | None = None) -> Trunk:
    """The trunk of a run; raises a TrunkError if its weights are missing or are others.

    `weights` is the file with them, if it is not the one that the trunk's name stands for. `run` is the folder of the
    run, which has them if they were learned from its images.
    """
    own = None if run is None else run / OWN_WEIGHTS
    if weights is None and own is not None and own.exists():
        weights = own
    trunk = open_trunk(spec.name, size=spec.size, weights=weights, options=spec.options)
    if trunk.spec.sha256 != spec.sha256:
        raise TrunkError(
            f"trunk {spec.name}: the weights have sha256 {trunk.spec.sha256[:12]}, but the run was learned with "
            f"{spec.sha256[:12]}; give the file of those weights with --trunk-weights FILE"
        )
    if trunk.spec != spec:
        raise TrunkError(f"trunk {spec.name}: the graph is {trunk.spec}, but the run was learned with {spec}")
    return trunk


def file_sha256(path: Path) -> str:
    """The checksum of a file of weights; raises a TrunkError if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise TrunkError(
            f"{path}: cannot be read ({error.strerror}); allowed: an existing file of weights, whose place "
            "--trunk-weights FILE gives if it was moved"
        ) from error
