"""Which depths of a trunk are worth reading: CIL by five folds of the training photos, for several subsets of them.

    python -m tests.benchmarks.depths FOLDER ... [--trunk efficientnet-lite0] [--seed 0]

The photos of each fold are classified by statistics of the other four, with all classes and the default settings; the
order of tasks makes no difference to them. Test photos take no part. A subset is the parts of the vector that belong to
it, scaled to length 1 again.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from models.trunks.trunk import open_trunk
from serving.bundle.pooled import PooledClassifier, PooledSettings, Projection, Statistics
from tests.benchmarks.photo_learners import Part, Photos
from training.data.encoder import Encoder
from training.show.console import Reporter

FOLDS = 5


def subsets(depths: int) -> dict[str, range]:
    """Names of subsets of the depths, the last of which is the head."""
    last = {f"last {count}": range(depths - count, depths) for count in (2, 3, 5) if count < depths}
    return {"head": range(depths - 1, depths), **last, "all": range(depths)}


def of_depths(encoded: NDArray[np.float32], widths: Sequence[int], chosen: Sequence[int]) -> NDArray[np.float64]:
    """The parts of vectors [n, sum of widths] that belong to some depths, scaled to length 1."""
    ends = np.cumsum([0, *widths])
    parts = np.concatenate([encoded[:, ends[each] : ends[each + 1]] for each in chosen], axis=1).astype(np.float64)
    scaled: NDArray[np.float64] = parts / np.maximum(np.linalg.norm(parts, axis=1, keepdims=True), 1e-12)
    return scaled


def right(vectors: NDArray[np.float64], class_ids: NDArray[np.int64], fold: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether each image [n] is classified right by the images of the other folds."""
    every, found = Statistics.of(vectors, class_ids, Projection(vectors.shape[1], 0)), np.zeros(len(fold), bool)
    for number in range(FOLDS):
        out = fold == number
        rest = every.copy()
        rest.remove(vectors[out], class_ids[out])
        classifier = PooledClassifier.fit(rest, PooledSettings())
        found[out] = classifier.class_ids[classifier.logits(vectors[out]).argmax(axis=1)] == class_ids[out]
    return found


def folds_of(part: Part, seed: int) -> NDArray[np.int64]:
    """Five parts of the images of every class, as good as random."""
    generator, fold = np.random.default_rng(seed), np.zeros(len(part.class_ids), np.int64)
    for class_id in np.unique(part.class_ids):
        own = generator.permutation(np.flatnonzero(part.class_ids == class_id))
        fold[own] = (np.arange(len(own)) + class_id) % FOLDS
    return fold


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.depths", description=__doc__)
    parser.add_argument("data", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--trunk", default="efficientnet-lite0")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    trunk = open_trunk(chosen.trunk)
    encoder, console = Encoder(trunk, reporter=Reporter()), Console(width=120, highlight=False)
    widths = trunk.spec.depths
    for folder in chosen.data:
        train = Photos.read(folder, encoder).split(1, None, chosen.seed).train
        fold = folds_of(train, chosen.seed)
        found = {
            name: right(of_depths(train.encoded, widths, some), train.class_ids, fold)
            for name, some in subsets(len(widths)).items()
        }
        shown = Table("depths", "numbers", "CIL %", "right only so", "right only with all", title=folder.name)
        for name, some in subsets(len(widths)).items():
            own, every = found[name], found["all"]
            only = (own & ~every).sum(), (every & ~own).sum()
            shown.add_row(name, str(sum(widths[each] for each in some)), f"{100 * own.mean():.2f}", *map(str, only))
        console.print(shown, f"{len(fold)} training photos, {chosen.trunk}, seed {chosen.seed}")


if __name__ == "__main__":
    main()
