"""Where in an image the evidence for an answer lies, from the feature maps of a trunk.

An encoded vector consists of parts. Each is the average of a feature map over space, divided by its length. So the
vector is a sum over the cells of a grid that is laid over the image, x = sum_j d_j. The evidence of cell j is what the
decision would lose without it: F(x) - F(x - d_j), where F is

- for a class: its logit minus the mean logit of the other classes, each weighted by its probability among them. With
  the weights fixed, F is linear in the logits. If these are linear in x (linear discriminant analysis, ridge regression
  on x), the evidence of all cells adds up to F(x) - F(0) exactly;
- for "unknown": the distance from the nearest class of the task that fits best. A distance is quadratic in x, so the
  evidence of the cells does not add up to it. `remainder` is what is missing; it is 0 where F is linear.

The lengths of the parts are taken as they are in the whole image.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Array = NDArray[np.floating[Any]]
Outputs = Mapping[str, NDArray[Any]]

MAP = "map"
"""Outputs of a trunk's graph: this and the number of a part of the encoded vector."""
SHORTEST = 1e-12
"""As in the graph: a part that is shorter is not scaled to unit length."""
FOR, AGAINST = (230, 120, 0), (0, 90, 200)
"""Orange and blue, which people with red-green colour blindness can tell apart."""
MOST_OPAQUE = 190
EXACT = 0.05
"""A map whose remainder is a larger share of the total is called not exact; also in `page/static/explain.js`."""


@dataclass(frozen=True)
class Explanation:
    """The evidence of every cell, [rows, columns]; positive numbers speak for the answer."""

    grid: Array
    total: float
    """F(x) - F(0)."""
    remainder: float
    """`total` minus the sum of the grid; 0 where the decision is linear."""

    @property
    def exact(self) -> bool:
        """Whether the grid adds up to the total, nearly."""
        return abs(self.remainder) <= EXACT * abs(self.total)


def cell_vectors(maps: Mapping[int, Array], depths: Sequence[int]) -> tuple[Array, tuple[int, int]]:
    """The encoded vector as a sum over cells [rows * columns, dim], and the shape of the grid.

    `maps` are those of one image by part, each [width, height, width of the map]. A part without a map is in no cell.
    """
    rows, columns = (min(each.shape[axis] for each in maps.values()) for axis in (1, 2))
    vectors = np.zeros((rows * columns, sum(depths)))
    for part, each in maps.items():
        height, width = each.shape[1:]
        # The first row and column of every cell.
        tops, lefts = (-(-np.arange(count) * side // count) for count, side in ((rows, height), (columns, width)))
        sums = np.add.reduceat(np.add.reduceat(each.astype(np.float64), tops, axis=1), lefts, axis=2)
        length = max(float(np.linalg.norm(each.mean(axis=(1, 2)))), SHORTEST)
        start = sum(depths[:part])
        scale = height * width * length * np.sqrt(len(depths))
        vectors[:, start : start + depths[part]] = sums.reshape(len(sums), -1).T / scale
    return vectors, (rows, columns)


def explain(
    encoded: Array,
    cells: Array,
    shape: tuple[int, int],
    outputs: Callable[[Array], Outputs],
    *,
    class_id: int,
    unknown: bool,
) -> Explanation:
    """The evidence for a class, or against it as the nearest one if the answer is "unknown"."""
    without = encoded - cells
    rows = np.concatenate([encoded[None], (encoded - cells.sum(axis=0))[None], without]).astype(np.float32)
    found = outputs(rows)
    if unknown:
        values = np.asarray(found["distances"], np.float64)[:, class_id]
    else:
        logits = np.asarray(found["logits"], np.float64)
        values = logits @ _contrast(logits[0], class_id)
    evidence = values[0] - values[2:]
    total = float(values[0] - values[1])
    return Explanation(evidence.reshape(shape), total, total - float(evidence.sum()))


def _contrast(logits: Array, class_id: int) -> Array:
    """Weights of the logits: 1 for the class, and minus the probabilities of the others among themselves."""
    rivals = logits.copy()
    rivals[class_id] = -np.inf
    # With a single class there is no rival.
    others = np.exp(rivals - rivals.max()) if len(rivals) > 1 else np.zeros(1)
    weights: Array = -others / max(others.sum(), SHORTEST)
    weights[class_id] = 1.0
    return weights


def heat_map(grid: Array, size: tuple[int, int]) -> bytes:
    """The grid as a transparent PNG image (width, height): orange speaks for the answer, blue against it."""
    strength = Image.fromarray((grid / max(float(np.abs(grid).max()), SHORTEST)).astype(np.float32))
    smooth = np.clip(np.asarray(strength.resize(size, Image.Resampling.BICUBIC)), -1.0, 1.0)
    pixels = np.where(smooth[:, :, None] >= 0, np.array(FOR, np.uint8), np.array(AGAINST, np.uint8))
    opacity = np.round(MOST_OPAQUE * np.abs(smooth)).astype(np.uint8)
    stored = io.BytesIO()
    Image.fromarray(np.dstack([pixels, opacity])).save(stored, "PNG")
    return stored.getvalue()
