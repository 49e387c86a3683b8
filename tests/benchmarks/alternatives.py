"""Published continual learners, as Avalanche has them: MNIST in five tasks, or the digits of our default in four.

    make compare DATA=FOLDER UNKNOWN=FOLDER
    make compare DATASET=digits

or, in an environment that has Avalanche:

    python -m tests.benchmarks.alternatives --data FOLDER --unknown FOLDER --seed 0 1 2
    python -m tests.benchmarks.alternatives --dataset digits --seed 0 1 2

All learn the network of our preset (`mnist-5t-cpu` or `digits`) in batches of 32, without augmentation, from all
training images; ours keeps a tenth of these for validation, of the digits a fifth. At most 200 images are stored, of
the digits 160. The tasks are {0, 1}, {2, 3}, ... for every seed; the default's digits 8 and 9 are in no task. Each
strategy gets Adam with rate 0.001 or SGD with rate 0.03, whichever is better on 600 training images per class after it
learned 1,000 others per class (of the digits, 30 and 80).

- CIL is the accuracy over all learned classes after the last task, and forgetting the mean loss of accuracy on a task
  since it was learned.
- AUROC is that of test digits, unknown being positive, by the largest softmax and by the energy of the scores:
  "foreign" against the test images of `--unknown`, a folder of images that `openworld fit --data` reads, shown in grey
  at the size of the digits; "8, 9" of the digits against those that no task has; "N, M not learned yet" against the
  last task, before it is learned.
- "learning s" is the processor time of the whole run, and "ms" that of one image, on one thread. "MB" is what answering
  needs.

A strategy that fails is named with its error and left out.
"""

from __future__ import annotations

import argparse
import time
import traceback
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor

from tests.benchmarks.alternative_data import SETTINGS, Data, Setting, named, part_for_choices, read
from tests.benchmarks.avalanche_learners import LEARNERS, OPTIMIZERS, AvalancheLearner, tasks_of
from tests.benchmarks.photo_learners import Figures, auroc, table
from training.measure.metrics import forgetting

CHUNK = 500


def better_optimizer(kind: type[AvalancheLearner], setting: Setting, data: Data, seed: int) -> str:
    part, epochs = part_for_choices(setting, data), setting.choice_epochs
    found = {each: measure(kind, each, setting, part, seed, epochs)["CIL %"] for each in OPTIMIZERS}
    print(f"{kind.name}: CIL on validation images {found}", flush=True)
    return max(found, key=found.__getitem__)


def measure(
    kind: type[AvalancheLearner], optimizer: str, setting: Setting, data: Data, seed: int, epochs: int
) -> Figures:
    """The figures of one strategy and seed."""
    torch.manual_seed(seed)
    np.random.seed(seed)  # Avalanche's buffers draw with the global generators
    tasks, per_task = setting.tasks, len(setting.tasks[0])
    learner, experiences = kind(optimizer, epochs, setting), tasks_of(data.train, tasks)
    matrix, seconds, figures = list[list[float | None]](), 0.0, Figures()
    if kind.joint:
        started = time.process_time()
        learner.learn(experiences)
        seconds = time.process_time() - started
    for learned in range(1, len(tasks) + 1):
        if not kind.joint:
            started = time.process_time()
            learner.learn(experiences[learned - 1])
            seconds += time.process_time() - started
        elif learned < len(tasks):
            continue
        known = data.class_ids < per_task * learned
        scores = scores_of(learner, data.test[known], per_task * learned)
        right = scores.argmax(1) == data.class_ids[known]
        task = data.class_ids[known] // per_task
        matrix.append([float(right[task == number].mean()) for number in range(learned)])
        if learned == len(tasks) - 1:
            strangers = scores_of(learner, data.test[~known], per_task * learned)
            figures |= unknown_figures(scores, strangers, f"{named(list(tasks[-1]))} not learned yet")
    for name, images in data.foreign.items():
        figures |= unknown_figures(scores, scores_of(learner, images, setting.classes), name)
    return {
        "CIL %": 100 * float(right.mean()),
        "forgetting": 0.0 if kind.joint else 100 * forgetting(matrix),
        **figures,
        "stored": float(learner.stored),
        "learning s": seconds,
        "MB": learner.bytes() / 1e6,
        "ms": milliseconds(learner, data.test),
    }


def scores_of(learner: AvalancheLearner, images: Tensor, classes: int) -> NDArray[Any]:
    """[n, classes]: scores of the classes that are learned."""
    return torch.cat([learner.scores(chunk)[:, :classes] for chunk in images.split(CHUNK)]).double().numpy()


def unknown_figures(known: NDArray[Any], unknown: NDArray[Any], name: str) -> Figures:
    """AUROC by the largest softmax and by the energy; unknown is positive."""
    figures = Figures()
    for score in (softmax_score, energy_score):
        figures[f"AUROC {name}, {score.__name__.removesuffix('_score')}"] = auroc(score(known), score(unknown))
    return figures


def energy_score(scores: NDArray[Any]) -> NDArray[Any]:
    largest = scores.max(1)
    energy: NDArray[Any] = -(largest + np.log(np.exp(scores - largest[:, None]).sum(1)))
    return energy


def softmax_score(scores: NDArray[Any]) -> NDArray[Any]:
    """The logarithm of the largest softmax, negated: it does not round to 1."""
    uncertainty: NDArray[Any] = -(scores.max(1) + energy_score(scores))
    return uncertainty


def milliseconds(learner: AvalancheLearner, images: Tensor) -> float:
    """Median processor time of one image alone."""
    taken = []
    for place in range(120):
        started = time.process_time()
        learner.scores(images[place : place + 1])
        taken.append(time.process_time() - started)
    return 1000 * float(np.median(taken[20:]))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.alternatives", description=__doc__)
    parser.add_argument("--dataset", choices=SETTINGS, default="mnist")
    parser.add_argument("--data", help="the folder that has or gets MNIST")
    parser.add_argument("--unknown", help="a folder of other images; MNIST needs one")
    parser.add_argument("--seed", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, help="default: 3, of the digits 20")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="strategies whose names contain one of these")
    chosen = parser.parse_args()
    if chosen.dataset == "mnist" and chosen.unknown is None:
        parser.error("--unknown is missing: a folder of images that are no digits; all classes of MNIST are learned")
    return chosen


def main() -> None:
    chosen = arguments()
    torch.set_num_threads(1)
    setting: Setting = SETTINGS[chosen.dataset]
    epochs = chosen.epochs or setting.epochs
    console, rows, failed = Console(width=220, highlight=False), dict[str, list[Figures]](), dict[str, str]()
    data, optimizers = read(setting, chosen.data, chosen.unknown), dict[str, str]()
    for seed, kind in ((seed, kind) for seed in chosen.seed for kind in LEARNERS):
        if chosen.only is not None and not any(name in kind.name for name in chosen.only):
            continue
        try:
            if kind.name not in optimizers:
                optimizers[kind.name] = better_optimizer(kind, setting, data, seed)
            figures = measure(kind, optimizers[kind.name], setting, data, seed, epochs)
        except Exception as error:  # a strategy of another library, which may not run with these versions
            traceback.print_exc()
            failed[kind.name] = f"{type(error).__name__}: {error}"
            continue
        rows.setdefault(f"{kind.name}, {optimizers[kind.name]}", []).append(figures)
        console.print(f"seed {seed}, {kind.name}: {figures}")
    versions = ", ".join(f"{name} {version(name)}" for name in ("avalanche-lib", "torch"))
    seeds = ", ".join(map(str, chosen.seed))
    console.print(table(f"{setting.title}, {epochs} epochs, {versions}, seeds {seeds}", rows))
    for name, reason in failed.items():
        console.print(f"{name} did not run: {reason}")


if __name__ == "__main__":
    main()
