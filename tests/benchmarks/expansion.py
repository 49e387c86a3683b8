"""How wide the random expansion of encoded photos has to be, by five folds of the photos that are learned from:

    python -m tests.benchmarks.expansion FOLDER --trunk efficientnet-lite0 --per-class 100

FOLDER has class folders, of which `train/` is used if there is one. Every row is another number of signed sums per
group (`serving.bundle.pooled.projection`). "ridge" is ridge regression with the better penalty of two, and "mixed" is
its equal mix with linear discriminant analysis; both are accuracies over all classes at once, in percent.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from models.trunks.trunk import open_trunk
from serving.bundle.pooled import Projection, Statistics
from serving.bundle.pooled.solution import discriminant, ridge_regression, ridge_triangle
from tests.benchmarks.feature_learners import Array, Ids
from training.data.class_folders import read_folder
from training.data.encoder import Encoder
from training.show.console import Reporter

FOLDS, SHRINKAGE, PENALTIES = 5, 0.45, (0.02, 0.06)


def accuracies(encoded: Array, class_ids: Ids, rows: int) -> tuple[float, float]:
    """Those of "ridge" and of "mixed"."""
    fold = np.random.default_rng(0).permutation(len(class_ids)) % FOLDS
    projection, ridge, mixed = Projection(encoded.shape[1], rows), np.zeros(len(PENALTIES)), np.zeros(len(PENALTIES))
    for number in range(FOLDS):
        own = fold == number
        statistics = Statistics.of(encoded[~own], class_ids[~own], projection)
        lda = discriminant(statistics.plain(), SHRINKAGE)
        outputs, phi = lda.outputs(encoded[own]) / lda.margin, projection.expand(encoded[own])
        for place, penalty in enumerate(PENALTIES):
            regression = ridge_regression(statistics, ridge_triangle(statistics, penalty))
            own_outputs = regression.outputs(phi) / regression.margin
            ridge[place] += (own_outputs.argmax(axis=1) == class_ids[own]).sum()
            mixed[place] += ((outputs + own_outputs).argmax(axis=1) == class_ids[own]).sum()
    return 100 * ridge.max() / len(class_ids), 100 * mixed.max() / len(class_ids)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.expansion", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trunk", default="efficientnet-lite0")
    parser.add_argument("--per-class", type=int, help="use so many photos of each class")
    parser.add_argument("--rows", type=int, nargs="+", default=[0, 16, 64, 128])
    chosen = parser.parse_args()
    train = chosen.folder / "train"
    images = read_folder(
        train if train.is_dir() else chosen.folder, Encoder(open_trunk(chosen.trunk), reporter=Reporter())
    ).images
    class_ids: Ids = np.unique(images.labels, return_inverse=True)[1].astype(np.int64)
    encoded = np.asarray(images.pixels, np.float64)
    if chosen.per_class is not None:
        order = np.random.default_rng(0).permutation(len(class_ids))
        kept = [order[class_ids[order] == each][: chosen.per_class] for each in np.unique(class_ids)]
        encoded, class_ids = encoded[np.concatenate(kept)], class_ids[np.concatenate(kept)]
    classes = len(np.unique(class_ids))
    print(f"{chosen.folder.name}, {chosen.trunk}: {len(class_ids)} photos, {len(class_ids) / classes:.0f} per class")
    for rows in chosen.rows:
        ridge, mixed = accuracies(encoded, class_ids, rows)
        print(f"{rows:4d} rows: ridge {ridge:.2f}, mixed {mixed:.2f}", flush=True)


if __name__ == "__main__":
    main()
