"""Ways to compare the scores of tasks, by how often each finds the right task of validation images:
`python -m tests.benchmarks.task_forms --out FOLDER --seed 0 1 2`.

The runs are those of `tests.benchmarks.digit_settings` in the same FOLDER; missing ones are learned. A form turns the
score of a task into a log-odds, by nothing but the scores of the task's own images that are in its memory and, in the
form of version 0.1, those of its rotated validation images.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from tests.benchmarks.digit_settings import CPU, SETTINGS, learned_run, setting_known
from tests.benchmarks.small_changes import mean_and_deviation
from training.data.sources import Sources
from training.data.tasks import task_data
from training.learn.decisions import Decider, make_decider
from training.learn.measurements import all_measurements, task_measurements
from training.measure.evaluation import known_and_unknown
from training.run import Run

Floats = NDArray[np.float64]
Form = Callable[[Floats, Floats, Floats], Floats]
"""(scores of an image [n], own scores in memory, scores of rotated own images) -> log-odds of the task [n]."""

LEAST_AWAY = 0.01
COMPARED = ("default", "one-class", "few", "uneven", "added")


def exponential(scores: Floats, own: Floats, rotated: Floats) -> Floats:
    """Own excess exponential, foreign scores uniform: what is served."""
    return -scores


def gaussian(scores: Floats, own: Floats, rotated: Floats) -> Floats:
    """Own scores Gaussian, foreign ones uniform."""
    z = (scores - own.mean()) / own.std()
    return np.where(z > 0, -(z**2) / 2, 0.0)


def standard(scores: Floats, own: Floats, rotated: Floats) -> Floats:
    """Mean 0 and deviation 1 instead of median 0 and mean excess 1."""
    return -(scores - own.mean()) / own.std()


def p_value(scores: Floats, own: Floats, rotated: Floats) -> Floats:
    """The logarithm of the p-value, continued exponentially beyond the largest own score."""
    ranked = np.sort(own)
    at_least = len(own) - np.searchsorted(ranked, scores)
    return np.asarray(np.log((1 + at_least) / (len(own) + 1)) - np.maximum(scores - ranked[-1], 0))


def gaussian_ratio(scores: Floats, own: Floats, rotated: Floats) -> Floats:
    """Own scores N(0, 1), foreign ones N(r, 1), where r is the square root of the mean standardised score of rotated
    images: version 0.1."""
    reach = math.sqrt(max((rotated.mean() - own.mean()) / own.std(), LEAST_AWAY))
    z = (scores - own.mean()) / own.std()
    return np.asarray(reach * (reach / 2 - z))


FORMS: dict[str, Form] = {
    "exponential (served)": exponential,
    "mean and deviation": standard,
    "Gaussian": gaussian,
    "p-value": p_value,
    "Gaussian ratio (0.1)": gaussian_ratio,
}


def scores_of(decider: Decider, run: Run, pixels: NDArray[np.uint8]) -> Floats:
    """Every task's scores of images [n, height, width, channels]: [n, tasks]."""
    measured = all_measurements(run.network, pixels, CPU)
    columns = [scorer.task_scores(own) for scorer, own in zip(decider.scorers, measured, strict=True)]
    return torch.stack(columns, dim=1).cpu().numpy()


def compared(run: Run, decision: str) -> list[tuple[str, float, float, float]]:
    """Each form with the share of validation images whose task it finds, its mean cross-entropy on them in nats, and
    the share for test images."""
    sources, decider = Sources(run.config), make_decider(run.network, decision, run.rule.alpha)
    data = [
        task_data(sources.of(run.config.lesson_of(task)), run.config, task, CPU) for task in range(len(decider.scorers))
    ]
    pixels = np.concatenate([each.validation.pixels.permute(0, 2, 3, 1).numpy() for each in data])
    true = np.repeat(np.arange(len(data)), [len(each.validation) for each in data])
    known, _ = known_and_unknown(sources.test_images()[0], run.config)
    of_label = {label: task for task, labels in enumerate(run.config.tasks) for label in labels}
    true_of_test = np.array([of_label[str(label)] for label in known.labels])
    seen, tested = scores_of(decider, run, pixels), scores_of(decider, run, known.pixels)
    own, rotated = [], []
    for task, each in enumerate(data):
        detector, scorer = run.network.detector(task), decider.scorers[task]
        own.append(scorer.task_scores(detector.memory()).cpu().numpy())
        turned = [torch.rot90(each.validation.pixels, quarters, (2, 3)) for quarters in (1, 2, 3)]
        rotated.append(scorer.task_scores(task_measurements(run.network, task, torch.cat(turned))).cpu().numpy())
    return [(name, *quality(form, seen, true, own, rotated), quality(form, tested, true_of_test, own, rotated)[0])
            for name, form in FORMS.items()]  # fmt: skip


def quality(
    form: Form, scores: Floats, true: NDArray[np.integer], own: Sequence[Floats], rotated: Sequence[Floats]
) -> tuple[float, float]:
    """The share of images whose task is found, and the mean cross-entropy in nats."""
    odds = np.stack([form(scores[:, task], own[task], rotated[task]) for task in range(len(own))], axis=1)
    shifted = odds - odds.max(axis=1, keepdims=True)
    losses = np.log(np.exp(shifted).sum(axis=1)) - shifted[np.arange(len(true)), true]
    return float((odds.argmax(axis=1) == true).mean()), float(losses.mean())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.task_forms", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--seed", type=int, nargs="+", default=[0])
    parser.add_argument("--setting", nargs="+", choices=SETTINGS, default=COMPARED)
    parser.add_argument("--decision", default="fused")
    chosen = parser.parse_args()
    for name in chosen.setting:
        every = []
        with setting_known(name):
            for seed in chosen.seed:
                run = learned_run(name, seed, "hat", chosen.out)
                print(f"\n{name}, seed {seed}, {chosen.decision}: TP % of validation images, nats, TP % of test images")
                every.append(compared(run, chosen.decision))
                for form, found, nats, tested in every[-1]:
                    print(f"{form:24} {100 * found:6.2f} {nats:8.3f} {100 * tested:6.2f}", flush=True)
        print(f"\n{name}, {chosen.decision}, mean and deviation of {len(every)} seeds")
        for of_form in zip(*every, strict=True):
            forms, of_validation, losses, of_test = zip(*of_form, strict=True)
            cells = (mean_and_deviation(shares, 2) for shares in (of_validation, of_test))
            print(f"{forms[0]:24} {' '.join(f'{cell:>16}' for cell in cells)}, {np.mean(losses):.3f} nats", flush=True)


if __name__ == "__main__":
    main()
