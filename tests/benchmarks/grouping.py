"""How well unknown photos are grouped: `python -m tests.benchmarks.grouping FOLDER`.

FOLDER has a folder of photos per class, or such folders in `train/`. For each seed, some classes are drawn as unknown,
and all others are known. Photos of the unknown classes are grouped as `openworld discover` does it, beside the known
classes of a model with a trunk, and as for a model without one.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from models.trunks.trunk import open_trunk
from serving.bundle.lessons import Teachable
from serving.bundle.pooled import ChoiceMemory, PooledSettings, Projection
from serving.bundle.pooled.factors import ClassFactors
from tests.benchmarks.photo_learners import Photos
from training.data.encoder import Encoder
from training.measure.discovery import group_features

MIN_SIZE = 10


def main() -> None:
    parser = argparse.ArgumentParser(description="Group photos of classes that a run does not know.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--unknown", type=int, nargs="+", default=[2, 5, 20], help="numbers of unknown classes")
    parser.add_argument("--seed", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--trunk", default="efficientnet-lite0")
    chosen = parser.parse_args()
    images = Photos.read(chosen.folder, Encoder(open_trunk(chosen.trunk))).train
    encoded, labels = np.asarray(images.pixels, np.float32), np.asarray(images.labels)
    print("| unknown classes | beside known classes | groups | classes found | purity % | in no group % |")
    print("|---|---|---|---|---|---|")
    for number in chosen.unknown:
        for beside in (True, False):
            rows = np.array([measured(encoded, labels, number, seed, beside) for seed in chosen.seed])
            cells = [f"{mean:.1f} ± {sd:.1f}" for mean, sd in zip(rows.mean(axis=0), rows.std(axis=0), strict=True)]
            print("|", " | ".join([str(number), "yes" if beside else "no", *cells]), "|", flush=True)


def measured(
    encoded: NDArray[np.float32], labels: NDArray[np.str_], number: int, seed: int, beside: bool
) -> tuple[float, float, float, float]:
    """Groups, classes that have a group of their own, share of images in groups that are of the group's class, rest."""
    drawn = np.random.default_rng(seed).permutation(np.unique(labels))[:number]
    unknown = np.isin(labels, drawn)
    known = None
    if beside:
        ids = np.unique(labels[~unknown], return_inverse=True)[1]
        factors = ClassFactors(Projection(encoded.shape[1], 0)).with_classes(encoded[~unknown], ids)
        known = Teachable(factors, ChoiceMemory(), PooledSettings())
    groups, _ = group_features(encoded[unknown], MIN_SIZE, known)
    most = [Counter(labels[unknown][groups == one]).most_common(1)[0] for one in range(groups.max() + 1)]
    inside = int((groups >= 0).sum())
    right = sum(count for _, count in most)
    found = len({label for label, _ in most})
    return len(most), found, 100 * right / max(inside, 1), 100 * (1 - inside / len(groups))


if __name__ == "__main__":
    main()
