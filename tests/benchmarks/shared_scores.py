"""How much the scores of all tasks should count beside those of each task (OTHERS of the decision rule):
`python -m tests.benchmarks.shared_scores --out FOLDER --setting one-class --seed 0 1 2 3`.

The runs are those of `tests.benchmarks.digit_settings` in the same FOLDER. Each task is left out in turn, and its
validation images are unknown to the rest. Beside that stand test images, by which nothing is chosen.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from unittest import mock

import numpy as np

from serving.bundle import own_scores
from serving.bundle.decision import Outputs, Rule, judge
from tests.benchmarks.digit_settings import CPU, SETTINGS, learned_run, setting_known
from tests.benchmarks.small_changes import mean_and_deviation
from training.data.sources import Sources
from training.data.tasks import task_data
from training.measure.evaluation import known_and_unknown
from training.measure.verdict import left_out
from training.run import Run

WEIGHTS = (0, 30, 100, 300, 1000)
COLUMNS = ("left-out task rejected", "others accepted", "test accepted", "lowest task", "8 and 9 rejected")
Evidence = tuple[Outputs, np.ndarray, Outputs, np.ndarray, Outputs]


def evidence_of(run: Run) -> Evidence:
    """Outputs and class ids of validation images and of known test images, and the outputs of unknown test images."""
    sources = Sources(run.config)
    tasks = range(len(run.config.tasks))
    held_back = [task_data(sources.of(run.config.lesson_of(task)), run.config, task, CPU).validation for task in tasks]
    pixels = np.concatenate([each.pixels.permute(0, 2, 3, 1).numpy() for each in held_back])
    class_ids = np.concatenate(
        [run.rule.columns[task].start + each.local_classes.numpy() for task, each in enumerate(held_back)]
    )
    known, unknown = known_and_unknown(sources.test_images()[0], run.config)
    of_test = np.array([run.config.labels.index(str(label)) for label in known.labels])
    return (
        run.outputs(pixels, CPU),
        class_ids,
        run.outputs(known.pixels, CPU),
        of_test,
        run.outputs(unknown.pixels, CPU),
    )


def shares(rule: Rule, evidence: Evidence) -> list[float]:
    """Those of COLUMNS."""
    validation, class_ids, known, of_test, unknown = evidence
    # A rule of its own: what depends on the weight is computed once per rule.
    fresh = rule.of(range(len(rule.tasks)))
    separation = left_out(validation, fresh, class_ids)
    assert separation is not None
    accepted = judge(known, fresh).known
    tasks = rule.task_of_class[of_test]
    return [
        separation.rejected_unknown,
        1 - separation.rejected_known,
        float(accepted.mean()),
        min(float(accepted[tasks == task].mean()) for task in range(len(rule.tasks))),
        float(1 - judge(unknown, fresh).known.mean()),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.shared_scores", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--setting", nargs="+", choices=SETTINGS, default=["one-class"])
    parser.add_argument("--seed", type=int, nargs="+", default=[0])
    chosen = parser.parse_args()
    for name in chosen.setting:
        with setting_known(name):
            runs = [learned_run(name, seed, "hat", chosen.out) for seed in chosen.seed]
            every = [(run.rule, evidence_of(run)) for run in runs]
        print(f"\n{name}, {len(every)} seeds, %\n{'OTHERS':>8}" + "".join(f"{column:>24}" for column in COLUMNS))
        for weight in WEIGHTS:
            with mock.patch.object(own_scores, "OTHERS", weight):
                found = zip(*(shares(*each) for each in every), strict=True)
                print(f"{weight:8}" + "".join(f"{mean_and_deviation(column):>24}" for column in found), flush=True)


if __name__ == "__main__":
    main()
