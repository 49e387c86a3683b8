"""A trunk and what identifies it. Importing this imports neither torch nor onnx."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from models.trunks import TRUNKS

INPUT, OUTPUT = "pixels", "encoded"
LEAST_SIZE, MOST_SIZE = 32, 1024
"""Allowed sides of the images, in pixels."""


class TrunkError(Exception):
    """A trunk that cannot be opened; the message says why and what to do."""


@dataclass(frozen=True)
class TrunkSpec:
    """What identifies a trunk, and the shapes of its graph. A run stores this, and never the weights."""

    name: str
    sha256: str
    """The checksum of the file of weights."""
    size: int
    """Images are uint8 [size, size, 3]."""
    depths: tuple[int, ...]
    """The widths of the parts of an encoded vector, each from another depth of the network."""

    def __post_init__(self) -> None:
        if not LEAST_SIZE <= self.size <= MOST_SIZE:
            raise ValueError(f"size of trunk {self.name} is {self.size}; allowed: {LEAST_SIZE} to {MOST_SIZE} pixels")
        if not self.depths or min(self.depths) < 1:
            raise ValueError(f"depths of trunk {self.name} are {self.depths}; allowed: widths of 1 or more")

    @property
    def dim(self) -> int:
        """How many numbers an encoded vector has."""
        return sum(self.depths)


@dataclass(frozen=True)
class Trunk:
    """A spec with its graph: `pixels`, uint8 [n, size, size, 3] -> `encoded`, float32 [n, dim].

    Each part of `encoded` has the length 1 / sqrt(number of parts), so a vector has length 1.
    """

    spec: TrunkSpec
    model: bytes
    """A serialised ONNX model, weights included."""

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

    @property
    def kind(self) -> str:
        """The name, or what is before its colon."""
        return self.name.partition(":")[0]

    @property
    def argument(self) -> str:
        """What is after the colon of the name."""
        return self.name.partition(":")[2]


def open_trunk(name: str, *, size: int | None = None, weights: str | Path | None = None) -> Trunk:
    """Open a trunk by its name; raises a TrunkError with what is allowed."""
    request = TrunkRequest(name, size, None if weights is None else Path(weights))
    if request.kind not in TRUNKS:
        raise TrunkError(f"trunk is {name!r}; allowed: {', '.join(TRUNKS)}")
    if size is not None and not LEAST_SIZE <= size <= MOST_SIZE:
        raise TrunkError(f"trunk {name}: size is {size}; allowed: {LEAST_SIZE} to {MOST_SIZE} pixels")
    module, _, function = TRUNKS[request.kind].partition(":")
    opener: Callable[[TrunkRequest], Trunk] = getattr(importlib.import_module(module), function)
    return opener(request)


def reopen(spec: TrunkSpec, *, weights: str | Path | None = None) -> Trunk:
    """The trunk of a run; raises a TrunkError if its weights are missing or are others."""
    trunk = open_trunk(spec.name, size=spec.size, weights=weights)
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
        raise TrunkError(f"{path}: cannot be read ({error.strerror}); allowed: a file of weights") from error
