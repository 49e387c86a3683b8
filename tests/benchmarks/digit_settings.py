"""The digits in settings that are harder than the default, each learned and measured by one command:
`python -m tests.benchmarks.digit_settings uneven --seed 0 1 2 --out FOLDER`.

A run that is finished is measured again and not learned again, so that FOLDER can be kept. The other benchmarks of the
decision take these runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from serving.bundle.decision import judge
from tests.benchmarks.many_tasks import GUISES, guised_digits
from tests.benchmarks.small_changes import mean_and_deviation
from training import fit
from training.config import Preset
from training.data.datasets import SOURCES
from training.data.images import TEST_SHARE, Images, Source, join
from training.data.reader import Reader
from training.data.sources import Sources
from training.learn.decisions import AUTO
from training.measure import metrics
from training.measure.evaluation import Evaluation, evaluate
from training.presets import PRESETS
from training.run import Run, open_run
from training.store.checkpoint import METRICS, started

CPU = torch.device("cpu")
UNKNOWN = ("8", "9")


def limited(images: Images, most: Callable[[str], int]) -> Images:
    """At most so many images of each class, always the same ones."""
    generator = np.random.default_rng(0)
    chosen = [
        generator.permutation((images.labels == label).nonzero()[0])[: most(str(label))]
        for label in np.unique(images.labels)
    ]
    return images.at(np.sort(np.concatenate(chosen)))


def source_with(most: Callable[[str], int]) -> Callable[[Reader, str | None], Source]:
    """The digits with fewer training images."""

    def load(reader: Reader, data: str | None = None) -> Source:
        digits = SOURCES["digits"](reader, data)
        return replace(digits, train=limited(digits.train, most))

    return load


def split_again(seed: int) -> Callable[[Reader, str | None], Source]:
    """The digits with another division into training and test images."""

    def load(reader: Reader, data: str | None = None) -> Source:
        digits = SOURCES["digits"](reader, data)
        train, test = join([digits.train, digits.test]).split(TEST_SHARE, seed)
        return replace(digits, train=train, test=test)

    return load


@dataclass(frozen=True)
class Setting:
    """Changes to the default preset, the source of its images, and a task that is added afterwards."""

    load: Callable[[Reader, str | None], Source] = SOURCES["digits"]
    changes: tuple[tuple[str, Any], ...] = ()
    added: str | None = None


EVERY = 10_000
SETTINGS = {
    "default": Setting(),
    "one-class": Setting(changes=(("classes_per_task", 1),)),
    "few": Setting(source_with(lambda label: 20)),
    "uneven": Setting(source_with(lambda label: 12 if label in "13579" else 120)),
    "added": Setting(source_with(lambda label: 20 if label in UNKNOWN else EVERY), added=",".join(UNKNOWN)),
    "guises": Setting(
        guised_digits, (("held_out", tuple(f"{digit} {guise}" for guise in GUISES for digit in UNKNOWN)),)
    ),
    **{f"split-{seed}": Setting(split_again(seed)) for seed in (1, 2, 3)},
}
"""`few`: 20 training images per class. `uneven`: 12 of each odd digit and 120 of each even one. `added`: 8 and 9 with
20 images each as a fifth task. `guises`: twenty tasks, 0 to 7 in five guises. `split-1`, ...: the default with other
test images. Unknown are 8 and 9, but in `added`."""


@contextmanager
def setting_known(name: str) -> Iterator[Setting]:
    """Within this, the preset `digits` is that of the setting, and runs of it can be opened."""
    setting, digits = SETTINGS[name], PRESETS["digits"]
    # Runs with the digits as they are can be opened by any command.
    dataset = digits.dataset if setting.load is SOURCES["digits"] else f"digits: {name}"
    preset: Preset = replace(digits, dataset=dataset, **dict(setting.changes))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "digits", preset)
        patch.setitem(SOURCES, preset.dataset, setting.load)
        yield setting


def place_of(name: str, seed: int, method: str, folder: Path) -> Path:
    return folder / f"{name}-{method}-{seed}"


COLUMNS = ("CIL", "TP", "accepted", "lowest", "rejected", "similar")


def learned_run(name: str, seed: int, method: str, folder: Path) -> Run:
    """The run of a setting, learned if its folder has none that is finished; needs `setting_known`."""
    place, setting = place_of(name, seed, method, folder), SETTINGS[name]
    if not (place / METRICS).exists():
        how = ["--resume"] if started(place) else ["--seed", str(seed), "--method", method]
        assert fit.main(["--out", str(place), *how]) == 0
    run = open_run(place, CPU)
    if setting.added and not set(setting.added.split(",")) <= set(run.config.labels):
        assert fit.main(["--out", str(place), "--add-task", setting.added]) == 0
        run = open_run(place, CPU)
    return run


def shares_after_each_task(evaluation: Evaluation) -> list[list[float]]:
    """Shares after each task: CIL and TP, accepted test images of all tasks so far and of the task with the lowest
    share, rejected unknown images, and of these only those in the guises of the tasks so far."""
    every = metrics.stages(
        evaluation.outputs, evaluation.run.rule, evaluation.class_ids, judge, evaluation.unknown_outputs
    )
    rows = []
    for number, (verdicts, class_ids, rule, accepted) in enumerate(every, start=1):
        tasks = metrics.task_of(class_ids, rule)
        guises = {guise_of(label) for labels in evaluation.run.config.tasks[:number] for label in labels}
        similar = np.array([guise_of(str(label)) in guises for label in evaluation.unknown.labels], dtype=bool)
        shares = [
            (verdicts.class_id == class_ids).mean(),
            (verdicts.task == tasks).mean(),
            verdicts.known.mean(),
            min(verdicts.known[tasks == task].mean() for task in range(number)),
            1 - accepted.mean() if len(accepted) else np.nan,
            1 - accepted[similar].mean() if similar.any() else np.nan,
        ]
        rows.append([float(share) for share in shares])
    return rows


def table(every: Sequence[Sequence[Sequence[float]]]) -> str:
    """The shares in % after each task [runs, tasks, columns]: of one run, or mean and deviation over several."""
    width = 16 if len(every) > 1 else 10
    lines = [f"{'tasks':>5}" + "".join(f"{name:>{width}}" for name in COLUMNS)]
    for number, of_runs in enumerate(zip(*every, strict=True), start=1):
        cells = (mean_and_deviation(shares) for shares in zip(*of_runs, strict=True))
        lines.append(f"{number:5}" + "".join(f"{cell:>{width}}" for cell in cells))
    return "\n".join(lines)


def guise_of(label: str) -> str:
    """ "7 striped" -> "striped"; a digit as it is has none."""
    return label.partition(" ")[2]


def by_class(evaluation: Evaluation) -> dict[str, float]:
    """CIL accuracy of each class."""
    right = evaluation.verdicts.class_id == evaluation.class_ids
    return {
        label: float(right[evaluation.class_ids == number].mean())
        for number, label in enumerate(evaluation.run.config.labels)
    }


def listed(every: Sequence[dict[str, float]]) -> str:
    """The CIL accuracy of each class in %, over the runs."""
    cells = {label: mean_and_deviation([each[label] for each in every]) for label in every[0]}
    return "CIL of each class: " + ", ".join(f"{label} {cell}" for label, cell in cells.items())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.digit_settings", description=__doc__)
    parser.add_argument("setting", choices=SETTINGS)
    parser.add_argument("--seed", type=int, nargs="+", default=[0])
    parser.add_argument("--method", choices=("hat", "sup"), default="hat")
    parser.add_argument("--decision", nargs="+", default=[AUTO], help="default: the one that each run chose")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    chosen = parser.parse_args()
    found: dict[str, list[tuple[list[list[float]], dict[str, float]]]] = {}
    with setting_known(chosen.setting):
        for seed in chosen.seed:
            learned_run(chosen.setting, seed, chosen.method, chosen.out)
            for decision in chosen.decision:
                run = open_run(place_of(chosen.setting, seed, chosen.method, chosen.out), CPU, decision)
                evaluation = evaluate(run, Sources(run.config), CPU)
                shares, classes = shares_after_each_task(evaluation), by_class(evaluation)
                found.setdefault(decision, []).append((shares, classes))
                print(f"\n{chosen.setting}, {chosen.method}, seed {seed}, decision {run.decider.name}")
                print(f"{table([shares])}\n{listed([classes])}", flush=True)
    for decision, of_runs in found.items() if len(chosen.seed) > 1 else ():
        print(f"\n{chosen.setting}, {chosen.method}, decision {decision}: mean and deviation of {len(of_runs)} seeds")
        print(f"{table([shares for shares, _ in of_runs])}\n{listed([classes for _, classes in of_runs])}", flush=True)


if __name__ == "__main__":
    main()
