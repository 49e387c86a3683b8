"""Pooled statistics without a trunk: raw pixels of the digits as the space that all tasks share:
`python -m tests.benchmarks.pooled_pixels`.

A network that is learned from scratch has no common space, but its images have one. Tasks {0,1} {2,3} {4,5} {6,7} are
learned from pixel vectors of length 1, with more or fewer rows of the expansion; 8 and 9 are unknown. A fifth of the
images of each class, drawn by the seed, is for testing.
"""

from __future__ import annotations

import numpy as np
from sklearn.datasets import load_digits

from serving.bundle.own_scores import threshold
from serving.bundle.pooled import Projection
from tests.benchmarks.feature_learners import ALPHA, Ours, unit
from tests.benchmarks.photo_learners import auroc

ROWS, SEEDS, KNOWN = (0, 64, 512), (0, 1, 2), 8


def figures(rows: int, seed: int) -> list[float]:
    """CIL %, unknown AUROC, known accepted % and unknown rejected %."""
    digits, generator = load_digits(), np.random.default_rng(seed)
    vectors, labels = unit(digits.images.reshape(len(digits.images), -1)), digits.target.astype(np.int64)
    tested = np.zeros(len(labels), bool)
    for label in range(10):
        own = generator.permutation(np.flatnonzero(labels == label))
        tested[own[: len(own) // 5]] = True
    learner = Ours(vectors.shape[1], seed, Projection(vectors.shape[1], rows))
    for first in range(0, KNOWN, 2):
        taught = ~tested & (labels // 2 == first // 2)
        learner.learn(vectors[taught], labels[taught])
    known, unknown = tested & (labels < KNOWN), tested & (labels >= KNOWN)
    probabilities, known_scores = learner.scores(vectors[known])
    unknown_scores, limit = learner.scores(vectors[unknown])[1], threshold(ALPHA)
    right = probabilities.argmax(axis=1) == labels[known]
    shares = 100 * float((known_scores <= limit).mean()), 100 * float((unknown_scores > limit).mean())
    return [100 * float(right.mean()), auroc(known_scores, unknown_scores), *shares]


def main() -> None:
    for rows in ROWS:
        found = np.array([figures(rows, seed) for seed in SEEDS])
        pairs = zip(found.mean(axis=0), found.std(axis=0, ddof=1), strict=True)
        cil, separation, accepted, rejected = (f"{mean:.3f} ± {spread:.3f}" for mean, spread in pairs)
        print(f"{rows} rows: CIL {cil} %, AUROC {separation}, accepted {accepted} %, rejected {rejected} %", flush=True)


if __name__ == "__main__":
    main()
