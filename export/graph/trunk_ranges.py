"""The ranges of a trunk's feature maps, measured on photos."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from models.trunks.trunk import INPUT
from serving.bundle.manifest import Graph
from serving.bundle.session import open_session, session_options

BATCH = 4
BINS = 2048
CUTS = np.concatenate([np.linspace(0.3, 0.98, 35), [1.0]])
"""Shares of the largest value that are tried as the end of a range."""
STEPS = 255


class Measured(NamedTuple):
    """The range of a tensor that loses least by 8-bit numbers, and the mean of every channel."""

    low: float
    high: float
    means: NDArray[np.float64]


def measure_ranges(model: onnx.ModelProto, names: Collection[str], pixels: NDArray[np.uint8]) -> dict[str, Measured]:
    """The ranges of feature maps [n, channels, height, width] on photos [n, size, size, 3].

    The photos are passed twice: for the extremes, and for the histogram between them. The ends of a range are cut where
    the squared error of rounding and cutting is smallest.
    """
    wanted = sorted(names)
    extremes = {name: [0.0, 0.0] for name in wanted}
    sums: dict[str, NDArray[np.float64]] = {}
    count = 0
    for maps in _maps(model, wanted, pixels):
        count += len(next(iter(maps.values())))
        for name, values in maps.items():
            low, high = extremes[name]
            extremes[name] = [min(low, float(values.min())), max(high, float(values.max()))]
            sums[name] = sums.get(name, 0.0) + values.mean(axis=(2, 3), dtype=np.float64).sum(axis=0)
    histograms = {name: np.zeros(BINS) for name in wanted}
    for maps in _maps(model, wanted, pixels):
        for name, values in maps.items():
            low, high = extremes[name]
            histograms[name] += np.histogram(values, BINS, (low, max(high, low + 1e-6)))[0]
    return {
        name: Measured(*_best_range(histograms[name], *extremes[name]), sums[name] / max(count, 1)) for name in wanted
    }


def _maps(model: onnx.ModelProto, names: Collection[str], pixels: NDArray[np.uint8]) -> Iterator[dict[str, Any]]:
    """The tensors of the given names, for a few photos at a time."""
    opened = onnx.ModelProto()
    opened.CopyFrom(model)
    del opened.graph.output[:]
    opened.graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names)
    session = open_session(Graph(opened.SerializeToString(), {}), session_options(1))
    for start in range(0, len(pixels), BATCH):
        found = session.run(list(names), {INPUT: pixels[start : start + BATCH]})
        yield dict(zip(names, found, strict=True))


def _best_range(histogram: NDArray[np.float64], low: float, high: float) -> tuple[float, float]:
    """The range within the extremes with the smallest squared error; an end at 0 stays there."""
    edges = np.linspace(low, max(high, low + 1e-6), BINS + 1)
    middles = (edges[:-1] + edges[1:]) / 2
    best, least = (low, high), np.inf
    for down in CUTS if low < 0 else (1.0,):
        for up in CUTS if high > 0 else (1.0,):
            start, end = low * down, high * up
            step = max(end - start, 1e-12) / STEPS
            cut = np.clip(middles, start, end) - middles
            # Rounding has the variance of a uniform distribution over one step.
            inside = (middles >= start) & (middles <= end)
            error = float((histogram * (cut**2 + inside * step**2 / 12)).sum())
            if error < least:
                best, least = (start, end), error
    return best
