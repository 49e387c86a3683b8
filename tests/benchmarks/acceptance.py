"""Whether a task accepts the share of its own images that it should, measured where chance can be told from bias:
`python -m tests.benchmarks.acceptance RUN...`.

Every task's threshold rests on its left-out training images and its validation images. The validation images of a task
are new to its network, and each run draws other ones. So the share of them that a threshold of the left-out images
alone accepts shows whether left-out images, which the network has seen, are too close; the share of test images depends
on one draw of some 90 images per task, which all runs have in common.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from training.data.sources import Sources
from training.learn.measurements import task_measurements
from training.measure.evaluation import known_and_unknown
from training.run import Run, RunError, open_run

CPU = torch.device("cpu")
COLUMNS = ("validation by left-out", "test by left-out", "test by both", "test by validation")


def accepted(scores: NDArray[np.float64], own: NDArray[np.float64], alpha: float) -> float:
    """The share of scores whose rank among the own scores is a p-value of at least alpha."""
    at_least = len(own) - np.searchsorted(np.sort(own), scores)
    return float(((1 + at_least) / (len(own) + 1) >= alpha).mean())


def shares(run: Run, data: str | None = None) -> list[list[float]]:
    """For each task the shares of COLUMNS, and the medians of left-out, validation and test images."""
    network, decider = run.need_decider("the acceptance by left-out images")
    known, _ = known_and_unknown(Sources(run.config, data).test_images()[0], run.config)
    rows = []
    for task, labels in enumerate(run.config.tasks):
        detector, scorer = network.detector(task), decider.scorers[task]
        pixels = torch.from_numpy(known.of(labels).pixels).permute(0, 3, 1, 2)
        test, own, left_out = (
            scorer.task_scores(means).numpy()
            for means in (task_measurements(network, task, pixels), detector.own.means(), detector.left_out.means())
        )
        both = np.concatenate([own, left_out])
        pairs = ((own, left_out), (test, left_out), (test, both), (test, own))
        rows.append(
            [accepted(scores, by, run.rule.alpha) for scores, by in pairs]
            + [float(np.median(each)) for each in (left_out, own, test)]
        )
    return rows


def summary(rows: Sequence[Sequence[float]]) -> str:
    """Mean and standard error of each share over tasks and runs."""
    table = 100 * np.array(rows)[:, : len(COLUMNS)]
    errors = table.std(axis=0, ddof=1) / np.sqrt(len(table))
    return ", ".join(
        f"{name} {mean:.1f} +- {error:.1f} %"
        for name, mean, error in zip(COLUMNS, table.mean(axis=0), errors, strict=True)
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.acceptance", description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--data", help="where the images are now, if they have moved")
    chosen = parser.parse_args()
    every = []
    for folder in chosen.runs:
        try:
            found = shares(open_run(folder, CPU), chosen.data)
        except RunError as error:
            sys.exit(f"error: {error}")
        for task, row in enumerate(found):
            every.append(row)
            shown = ", ".join(f"{100 * share:.1f}" for share in row[: len(COLUMNS)])
            medians = ", ".join(f"{value:.2f}" for value in row[len(COLUMNS) :])
            print(f"{folder} task {task}: {shown}; medians of left-out, validation, test {medians}", flush=True)
    print(summary(every))


if __name__ == "__main__":
    main()
