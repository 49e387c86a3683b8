"""Which share of its own images a single task accepts at alpha 0.05, by the number of stored scores:
`python -m tests.benchmarks.own_acceptance`, mean and least over draws of the stored scores, each with 1,000 new images.

It needs no run: scores are drawn from distributions.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from serving.bundle.decision import Rule, TaskRule, judge

Floats = NDArray[np.float64]
DRAWS: dict[str, Callable[[np.random.Generator, int], Floats]] = {
    "normal": lambda generator, size: generator.normal(size=size),
    "exponential": lambda generator, size: generator.exponential(size=size),
    "lognormal": lambda generator, size: generator.lognormal(size=size),
    "Student's t, 3": lambda generator, size: generator.standard_t(3, size=size),
}
COUNTS = (2, 4, 9, 20, 50, 200)
NEW_IMAGES = 1000
ALPHA = 0.05


def shares(kind: str, images: int, draws: int) -> list[float]:
    """The share of new images that is accepted, for each draw of the stored scores."""
    generator, found = np.random.default_rng(images), []
    for _ in range(draws):
        rule = Rule(alpha=ALPHA, tasks=(TaskRule.fit(DRAWS[kind](generator, images), classes=1),))
        new = DRAWS[kind](generator, NEW_IMAGES)[:, None]
        found.append(float(judge({"logits": np.zeros_like(new), "distances": new}, rule).known.mean()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.own_acceptance", description=__doc__)
    parser.add_argument("--draws", type=int, default=1000, metavar="N")
    chosen = parser.parse_args()
    print(f"accepted at alpha {ALPHA}, %, mean (least) of {chosen.draws} draws")
    print("| stored scores |" + "".join(f" {kind} |" for kind in DRAWS) + "\n|---|" + "---|" * len(DRAWS))
    for images in COUNTS:
        cells = [shares(kind, images, chosen.draws) for kind in DRAWS]
        print(f"| {images} |" + "".join(f" {100 * np.mean(c):.1f} ({100 * min(c):.1f}) |" for c in cells), flush=True)


if __name__ == "__main__":
    main()
