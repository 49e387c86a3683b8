"""How many known test images of a run are called unknown after a small change, and how many are still recognised:
`python -m tests.benchmarks.small_changes RUN...`, the mean and the standard deviation over the runs."""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from serving.bundle.decision import judge
from training.data.sources import Sources
from training.measure.evaluation import known_and_unknown
from training.run import Run, open_run

CPU = torch.device("cpu")
Change = Callable[[Tensor], Tensor]


def resampled(images: Tensor, right: float = 0.0, degrees: float = 0.0, scale: float = 1.0) -> Tensor:
    """Images in [0, 255] moved to the right by a share of the side, tilted, and enlarged by `scale`."""
    cos, sin = (function(math.radians(degrees)) / scale for function in (math.cos, math.sin))
    affine = torch.tensor([[cos, -sin, -2 * right], [sin, cos, 0.0]]).expand(len(images), 2, 3)
    grid = functional.affine_grid(affine, list(images.shape), align_corners=False)
    return functional.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def noisy(images: Tensor) -> Tensor:
    return images + 10 * torch.randn(images.shape, generator=torch.Generator().manual_seed(0))


CHANGES: dict[str, Change] = {
    "unchanged": lambda images: images,
    "moved by 1/16 of the side": lambda images: resampled(images, right=1 / 16),
    "tilted by 10 degrees": lambda images: resampled(images, degrees=10),
    "scaled to 110 %": lambda images: resampled(images, scale=1.1),
    "scaled to 130 %": lambda images: resampled(images, scale=1.3),
    "brightness 75 %": lambda images: images * 0.75,
    "brightness 50 %": lambda images: images * 0.5,
    "thicker by a pixel": lambda images: functional.max_pool2d(functional.pad(images, (0, 1, 0, 1)), 2, 1),
    "noise of deviation 10": noisy,
}


def changed(pixels: NDArray[np.uint8], change: Change) -> NDArray[np.uint8]:
    """uint8 images [n, height, width, channels] after a change."""
    images = change(torch.from_numpy(pixels).permute(0, 3, 1, 2).float())
    return np.ascontiguousarray(images.clamp(0, 255).round().byte().permute(0, 2, 3, 1).numpy())


def rows(run: Run, data: str | None = None) -> list[tuple[str, float, float]]:
    """Each change with the shares of known test images that are called unknown, and whose best guess is right; last,
    unchanged images of classes never learned."""
    known, unknown = known_and_unknown(Sources(run.config, data).test_images()[0], run.config)
    labels = np.array(run.config.labels)
    found = []
    for name, change in CHANGES.items():
        verdicts = judge(run.outputs(changed(known.pixels, change), CPU), run.rule)
        right = labels[verdicts.class_id] == known.labels
        found.append((name, float(1 - verdicts.known.mean()), float(right.mean())))
    if len(unknown):
        verdicts = judge(run.outputs(unknown.pixels, CPU), run.rule)
        found.append(("never learned", float(1 - verdicts.known.mean()), math.nan))
    return found


def mean_and_deviation(shares: Sequence[float], digits: int = 1) -> str:
    """Of shares, in %; of one share only itself."""
    values = [100 * share for share in shares if not math.isnan(share)]
    if not values:
        return "-"
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.small_changes", description=__doc__)
    parser.add_argument("run", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--data", help="where the images are now, if they have moved")
    chosen = parser.parse_args()
    every = [rows(open_run(folder, CPU), chosen.data) for folder in chosen.run]
    print(f"{'change':28} {'unknown %':>16} {'right %':>16}")
    for of_change in zip(*every, strict=True):
        names, shares, right = zip(*of_change, strict=True)
        print(f"{names[0]:28} {mean_and_deviation(shares):>16} {mean_and_deviation(right):>16}")


if __name__ == "__main__":
    main()
