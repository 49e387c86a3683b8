"""How many known test images of a run are called unknown after a small change, and how many are still recognised:
`python -m tests.benchmarks.small_changes RUN...`, the mean and the standard deviation over the runs.

Of a run with a trunk, the pixels that the trunk reads are changed and encoded again, which takes time: ten times as
long as encoding all its test photos once, and four times that if adapters read rotations.
"""

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

from models.trunks.trunk import reopen
from serving.bundle.decision import Verdicts, judge
from serving.bundle.manifest import Graph
from serving.bundle.model import encode_rotations
from serving.bundle.session import open_session
from training.data.images import Images, join
from training.data.opening import open_sources
from training.data.reread import reread
from training.measure.evaluation import known_and_unknown
from training.run import Readings, Run, open_run

CPU = torch.device("cpu")
AT_ONCE = 64
"""Photos that are in memory as pixels."""
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


def reader(run: Run) -> Callable[[NDArray[np.uint8]], Readings]:
    """From pixels to what the run decides on: the pixels themselves or, with a trunk, their vectors."""
    if run.config.trunk is None:
        return lambda pixels: pixels
    session = open_session(Graph(reopen(run.config.trunk, run=run.folder).model, {}))
    return lambda pixels: encode_rotations(session, pixels, run.rotations)


def judged(
    run: Run, read: Callable[[NDArray[np.uint8]], Readings], images: Images, changes: Sequence[Change]
) -> tuple[list[Verdicts], Images]:
    """The verdicts on images after each of the changes, and the images whose pixels could be read."""
    found: list[list[Verdicts]] = [[] for _ in changes]
    kept = []
    for start in range(0, len(images), AT_ONCE):
        pixels, readable = reread(
            images.at(np.arange(start, min(start + AT_ONCE, len(images)))), run.config.preset.image
        )
        kept.append(readable)
        for verdicts, change in zip(found, changes, strict=True):
            verdicts.append(judge(run.outputs(read(changed(pixels, change)), CPU), run.rule))
    return [Verdicts(*map(np.concatenate, zip(*each, strict=True))) for each in found], join(kept)


def rows(run: Run, data: str | None = None) -> list[tuple[str, float, float]]:
    """Each change with the shares of known test images that are called unknown, and whose best guess is right; last,
    unchanged images of classes never learned."""
    source, _ = open_sources(run.config, data, run=run.folder).test_images()
    known, unknown = known_and_unknown(source, run.config)
    labels = np.array(run.config.labels)
    read = reader(run)
    every, kept = judged(run, read, known, list(CHANGES.values()))
    found = [
        (name, float(1 - verdicts.known.mean()), float((labels[verdicts.class_id] == kept.labels).mean()))
        for name, verdicts in zip(CHANGES, every, strict=True)
    ]
    if len(unknown):
        ((verdicts,), _) = judged(run, read, unknown, [CHANGES["unchanged"]])
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
