"""`patches`: filters that are learned without labels from small parts of images, by k-means of whitened patches.

For images that are far from photographs, or too small for a network that was trained on photographs. As in Coates, Lee
and Ng (2011): patches have their brightness and contrast removed and are whitened; their cluster centres become filters
of one convolution. What exceeds a threshold, on either side, is averaged over the quarters of the image.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from models.trunks.graph import Depth, TrunkGraph
from models.trunks.trunk import OWN_WEIGHTS, Trunk, TrunkError, TrunkRequest, TrunkSpec, file_sha256
from models.trunks.weights import load_state

NAME = "patches"
SIZE = 32
"""The default side of the images."""
OPTIONS = ("count", "side")
COUNT, SIDE = 400, 6
"""The default number of filters, and the side of a patch in pixels."""
MOST_COUNT, SIDES = 4000, range(3, 13)
SAMPLED = 100_000
"""Patches that the filters are learned from."""
TIMED = 2000
"""Patches by which it is measured how long that takes."""
ROUNDS = 12
CONTRAST = 10.0
"""Added to the variance of a patch, whose pixels are in 0..255, so that the noise of flat patches is not amplified."""
WHITENING = 0.1
"""Added to the variances of patches of unit contrast before whitening."""
THRESHOLD = 0.25
GRID = 2
"""Parts of an image per side, over each of which the responses are averaged."""
MIDDLE = 127.5

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Patches:
    """Filters on patches whose brightness is removed: response = filter . patch / contrast - offset."""

    filters: NDArray[np.float32]  # [count, 3, side, side]
    offsets: NDArray[np.float32]  # [count]

    @property
    def side(self) -> int:
        return int(self.filters.shape[-1])

    @property
    def dim(self) -> int:
        """Two numbers per filter, above and below the threshold, in each part of the image."""
        return 2 * len(self.filters) * GRID**2


def learn_patches(pixels: NDArray[np.uint8], seed: int, count: int = COUNT, side: int = SIDE) -> Patches:
    """Filters of images [n, size, size, 3], whose labels are not needed; the same for the same images and seed."""
    random = np.random.default_rng(seed)
    flat = _drawn(pixels, side, random)
    flat -= flat.mean(axis=1, keepdims=True)
    flat /= np.sqrt(flat.var(axis=1, keepdims=True) + CONTRAST)
    mean = flat.mean(axis=0)
    flat -= mean
    values, vectors = np.linalg.eigh(flat.T @ flat / len(flat))
    whitening = (vectors / np.sqrt(np.maximum(values, 0) + WHITENING)) @ vectors.T
    centres = _centres(flat @ whitening, count, random)
    filters = centres @ whitening
    offsets = filters @ mean
    # Removing the brightness of a patch is part of the filter.
    filters -= filters.mean(axis=1, keepdims=True)
    planes = filters.reshape(count, side, side, 3).transpose(0, 3, 1, 2)
    return Patches(np.ascontiguousarray(planes, np.float32), offsets.astype(np.float32))


def seconds_to_learn(count: int, side: int) -> float:
    """How long the filters take here: measured on a few patches that are random numbers."""
    some = np.random.default_rng(0).normal(size=(TIMED, 3 * side**2))
    started = time.perf_counter()
    _centres(some, count, np.random.default_rng(0))
    return (time.perf_counter() - started) * SAMPLED / TIMED


def random_patches(count: int, side: int) -> Patches:
    """Filters that take as long as learned ones, and mean nothing."""
    filters = np.random.default_rng(0).normal(size=(count, 3, side, side))
    return Patches(filters.astype(np.float32), np.zeros(count, np.float32))


def _drawn(pixels: NDArray[np.uint8], side: int, random: np.random.Generator) -> Array:
    """Patches [n, side * side * 3] at random places of random images."""
    images = random.integers(0, len(pixels), SAMPLED)
    rows, columns = (random.integers(0, pixels.shape[axis] - side + 1, SAMPLED) for axis in (1, 2))
    windows = np.lib.stride_tricks.sliding_window_view(pixels, (side, side), axis=(1, 2))
    return windows[images, rows, columns].transpose(0, 2, 3, 1).reshape(SAMPLED, -1).astype(np.float64)


def _centres(patches: Array, count: int, random: np.random.Generator) -> Array:
    """Directions [count, dim] by k-means on the sphere, where a direction and its opposite are one."""
    centres = _unit(random.normal(size=(count, patches.shape[1])))
    for _ in range(ROUNDS):
        responses = patches @ centres.T
        nearest = np.abs(responses).argmax(axis=1)
        weighted = patches * responses[np.arange(len(patches)), nearest][:, None]
        order = np.argsort(nearest, kind="stable")
        used, starts = np.unique(nearest[order], return_index=True)
        # A centre that no patch is nearest to starts again at a patch.
        centres = patches[random.integers(0, len(patches), count)]
        centres[used] = np.add.reduceat(weighted[order], starts)
        centres = _unit(centres)
    return centres


def _unit(rows: Array) -> Array:
    unit: Array = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    return unit


def as_trunk(patches: Patches, size: int) -> Trunk:
    """The trunk of learned filters, with the weights that the run must keep."""
    content = save({"filters": patches.filters, "offsets": patches.offsets})
    return _trunk(patches, size, hashlib.sha256(content).hexdigest(), content)


def open_patches(request: TrunkRequest) -> Trunk:
    """The trunk of filters that a run has learned before."""
    if request.weights is None:
        raise TrunkError(
            f"trunk {NAME}: its filters are learned from the images of a run, which keeps them in {OWN_WEIGHTS}; "
            "that file is missing: restore it from a copy, or give its place with --trunk-weights FILE"
        )
    state = load_state(request.weights)
    shapes = {name: values.shape for name, values in state.items()}
    filters, offsets = (state.get(name, np.empty(0)).astype(np.float32) for name in ("filters", "offsets"))
    fits = filters.ndim == 4 and filters.shape[1] == 3 and filters.shape[2] == filters.shape[3]
    if not fits or offsets.shape != filters.shape[:1]:
        raise TrunkError(
            f"{request.weights}: tensors {shapes}; allowed: filters [count, 3, side, side] and offsets [count]"
        )
    return _trunk(Patches(filters, offsets), request.size or SIZE, file_sha256(request.weights), None)


def patch_options(request: TrunkRequest) -> dict[str, int]:
    """The number and side of the filters that are to be learned."""
    request.check_options(*OPTIONS)
    found: dict[str, int] = {}
    for name, default, allowed in (("count", COUNT, range(1, MOST_COUNT + 1)), ("side", SIDE, SIDES)):
        text = request.options.get(name, str(default))
        if not (text.isascii() and text.isdecimal() and int(text) in allowed):
            raise TrunkError(f"{name} of trunk {NAME} is {text!r}; allowed: {allowed.start} to {allowed.stop - 1}")
        found[name] = int(text)
    return found


def _trunk(patches: Patches, size: int, sha256: str, weights: bytes | None) -> Trunk:
    if patches.side + GRID > size:
        raise TrunkError(f"trunk {NAME}: size is {size}; allowed: at least {patches.side + GRID}")
    return Trunk(TrunkSpec(NAME, sha256, size, (patches.dim,)), _graph(patches, size), weights=weights)


def _graph(patches: Patches, size: int) -> bytes:
    graph, side = TrunkGraph(), patches.side
    images = graph.add("Sub", "pixels/centred", [graph.planes(), graph.constant("pixels/middle", MIDDLE)])
    box = graph.constant("box", np.full((1, 3, side, side), 1 / (3 * side * side)))
    mean = graph.add("Conv", "patch/mean", [images, box])
    square = graph.add("Conv", "patch/square", [graph.add("Mul", "pixels/square", [images, images]), box])
    variance = graph.add("Sub", "patch/variance", [square, graph.add("Mul", "patch/mean_square", [mean, mean])])
    floor = graph.constant("floor", CONTRAST)
    # Rounding may make the variance of a flat patch negative.
    above = graph.add("Max", "patch/above", [variance, graph.constant("nothing", 0.0)])
    contrast = graph.add("Sqrt", "patch/contrast", [graph.add("Add", "patch/floored", [above, floor])])
    filtered = graph.add("Conv", "filtered", [images, graph.constant("filters", patches.filters)])
    scaled = graph.add("Div", "response/scaled", [filtered, contrast])
    offsets = patches.offsets[:, None, None]
    parts = []
    for name, sign in (("above", 1.0), ("below", -1.0)):
        signed = scaled if sign > 0 else graph.add("Neg", "response/negative", [scaled])
        least = graph.constant(f"{name}/least", (sign * offsets + THRESHOLD).astype(np.float32))
        excess = graph.add("Relu", f"{name}/excess", [graph.add("Sub", f"{name}/difference", [signed, least])])
        parts.append(_pooled(graph, name, excess, size - side + 1))
    joined = graph.add("Concat", "responses", parts, axis=1)
    # Means of responses are skewed; their roots are closer to a normal distribution.
    root = graph.add("Sqrt", "roots", [joined])
    graph.join([Depth(root, np.zeros(patches.dim), np.ones(patches.dim))])
    return graph.model(size, patches.dim)


def _pooled(graph: TrunkGraph, name: str, maps: str, side: int) -> str:
    stride = side // GRID
    kernel = side - (GRID - 1) * stride
    averaged = graph.add(
        "AveragePool", f"{name}/parts", [maps], kernel_shape=[kernel, kernel], strides=[stride, stride]
    )
    return graph.add("Flatten", f"{name}/vector", [averaged], axis=1)
