"""Whether explanations point at what matters: `python -m tests.benchmarks.deletion BUNDLE FOLDER`.

FOLDER has photos in one folder per class that the bundle was not fitted to. For each photo that is answered correctly,
the cells with the most evidence for its class are blanked with the photo's mean colour, and for comparison as many of
the other cells, drawn at random. What counts is by how much the probability of the class falls. For photos that are
called unknown, what counts is by how much their distance from the nearest class falls.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from serving.bundle.decision import complete
from serving.bundle.model import BundleModel
from serving.bundle.pixels import open_image, to_pixels

VALUES = {"class": "probability", "unknown": "distance"}
DRAWS = 5
"""Random choices of other cells per photo."""


def blanked(pixels: NDArray[np.uint8], cells: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """The image [height, width, 3] with these cells of a grid in its mean colour."""
    (height, width), (rows, columns) = pixels.shape[:2], cells.shape
    chosen = cells[np.ix_(np.arange(height) * rows // height, np.arange(width) * columns // width)]
    mean = np.round(pixels.mean(axis=(0, 1))).astype(np.uint8)
    return np.where(chosen[:, :, None], mean, pixels)


def most(grid: NDArray[np.floating], count: int) -> NDArray[np.bool_]:
    """The cells with the most evidence."""
    cells = np.zeros(grid.size, bool)
    cells[np.argsort(-grid, axis=None, kind="stable")[:count]] = True
    return cells.reshape(grid.shape)


def others(chosen: NDArray[np.bool_], count: int, chance: np.random.Generator) -> NDArray[np.bool_]:
    """As many of the other cells."""
    cells = np.zeros(chosen.size, bool)
    cells[chance.choice(np.flatnonzero(~chosen), count, replace=False)] = True
    return cells.reshape(chosen.shape)


def falls(model: BundleModel, pixels: NDArray[np.uint8], share: float, seed: int) -> tuple[str, float, float, float]:
    """ "class" or "unknown", the value of the whole photo, and the value without its best and without other cells."""
    verdict = model.predict(pixels[None])
    unknown, class_id = not bool(verdict.known[0]), int(verdict.class_id[0])
    grid = model.explain(pixels[None], class_id=class_id, unknown=unknown).grid
    count = max(1, round(share * grid.size))
    best, chance = most(grid, count), np.random.default_rng(seed)
    cells = [np.zeros_like(best), best, *(others(best, count, chance) for _ in range(DRAWS))]
    outputs = complete(model.run(np.stack([blanked(pixels, each) for each in cells])), model.bundle.rule)
    values = outputs["distances" if unknown else "probability"][:, class_id]
    return "unknown" if unknown else "class", float(values[0]), float(values[1]), float(values[2:].mean())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--photos", type=int, default=200)
    parser.add_argument("--share", type=float, default=0.2, help="share of the cells that are blanked")
    chosen = parser.parse_args()
    model = BundleModel.load(chosen.bundle, provider="cpu")
    files = sorted(path for path in chosen.folder.glob("*/*") if path.is_file())
    random.Random(0).shuffle(files)
    found: dict[str, list[tuple[float, float, float]]] = {"class": [], "unknown": []}
    for seed, path in enumerate(files):
        pixels = to_pixels(open_image(path.read_bytes()), model.manifest.image)
        verdict = model.predict(pixels[None])
        right = model.manifest.labels[int(verdict.class_id[0])] == path.parent.name
        kind = "class" if verdict.known[0] else "unknown"
        if (right or kind == "unknown") and len(found[kind]) < chosen.photos:
            found[kind].append(falls(model, pixels, chosen.share, seed)[1:])
        if len(found["class"]) == chosen.photos:
            break
    for kind, rows in found.items():
        if not rows:
            continue
        whole, without, other = np.array(rows).T
        drop, usual = whole - without, whole - other
        error = 1.96 * np.std(drop - usual) / np.sqrt(len(rows))
        print(
            f"{kind}: {len(rows)} photos, {VALUES[kind]} {whole.mean():.3f}; without "
            f"the {100 * chosen.share:.0f} % of cells with the most evidence {without.mean():.3f} (falls by "
            f"{drop.mean():.3f}), without as many others {other.mean():.3f} (falls by {usual.mean():.3f}); difference "
            f"{(drop - usual).mean():.3f} +- {error:.3f}"
            + (f"; ratio {drop.mean() / usual.mean():.1f}" if usual.mean() > 0 else "")
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
