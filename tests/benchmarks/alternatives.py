"""Published continual learners, as Avalanche has them, on MNIST in five tasks with 200 stored images at most:

    make compare DATA=FOLDER UNKNOWN=FOLDER

or, in an environment that has Avalanche:

    python -m tests.benchmarks.alternatives --data FOLDER --unknown FOLDER --seed 0 1 2

All learn the network of `mnist-5t-cpu` in batches of 32, without augmentation, from all 60,000 training images; ours
keeps a tenth of these for validation. The tasks are {0, 1}, {2, 3}, ... for every seed. Each strategy gets Adam with
rate 0.001 or SGD with rate 0.03, whichever is better on 6,000 training images after it learned 1,000 others per class.

- CIL is the accuracy over all classes after the last task, and forgetting the mean loss of accuracy on a task since it
  was learned.
- AUROC "foreign" is that of test digits against the test images of `--unknown`, a folder of images that
  `openworld fit --data` reads, shown in grey as 28x28 pixels. AUROC "8, 9" is that of the digits 0 to 7 against 8 and 9
  when these are not learned yet. Both are by the largest softmax and by the energy of the scores.
- "learning s" is the processor time of the whole run, and "ms" that of one image, on one thread. "MB" is what answering
  needs.

A strategy that fails is named with its error and left out.
"""

from __future__ import annotations

import argparse
import time
import traceback
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor

from serving.bundle.sections import ImageSpec
from tests.benchmarks.avalanche_learners import CLASSES, LEARNERS, OPTIMIZERS, AvalancheLearner, Digits, tasks_of
from tests.benchmarks.photo_learners import Figures, auroc, table
from training.data.datasets import load_source
from training.data.images import Images
from training.measure.metrics import forgetting

TASKS = [(first, first + 1) for first in range(0, CLASSES, 2)]
IMAGE = ImageSpec(height=28, width=28, mode="L")
CHUNK = 500


class Data(NamedTuple):
    """Images [n, 1, 28, 28] as the network reads them, and the numbers of their classes [n]."""

    train: Digits
    test: Tensor
    class_ids: NDArray[np.int64]
    foreign: Tensor


def pixels_of(images: Images) -> Tensor:
    """The scale of `mnist-5t-cpu`: mean 0, standard deviation 0.5 of values from 0 to 1."""
    pixels = np.asarray(images.pixels, np.float32).reshape(len(images), 1, IMAGE.height, IMAGE.width)
    return torch.from_numpy(pixels / 255 / 0.5)


def read(data: str | None, unknown: str) -> Data:
    source = load_source("mnist", IMAGE, data)
    foreign = load_source("folder", IMAGE, unknown).test
    train = Digits(pixels_of(source.train), ids_of(source.train))
    return Data(train, pixels_of(source.test), ids_of(source.test), pixels_of(foreign))


def ids_of(images: Images) -> NDArray[np.int64]:
    return np.array([int(label) for label in images.labels], np.int64)


def part_for_choices(data: Data) -> Data:
    """Of the training images, 1,000 of each class to learn and 600 others of each to measure."""
    ids = np.array(data.train.targets, np.int64)
    places = [np.flatnonzero(ids == each) for each in range(CLASSES)]
    learned, measured = (np.concatenate([each[cut] for each in places]) for cut in (slice(1000), slice(-600, None)))
    train = Digits(data.train.images[learned], ids[learned])
    return Data(train, data.train.images[measured], ids[measured], data.foreign[:CHUNK])


def better_optimizer(kind: type[AvalancheLearner], data: Data, seed: int) -> str:
    part = part_for_choices(data)
    found = {each: measure(kind, each, part, seed, epochs=1)["CIL %"] for each in OPTIMIZERS}
    print(f"{kind.name}: CIL on validation images {found}", flush=True)
    return max(found, key=found.__getitem__)


def measure(kind: type[AvalancheLearner], optimizer: str, data: Data, seed: int, epochs: int) -> Figures:
    """The figures of one strategy and seed."""
    torch.manual_seed(seed)
    np.random.seed(seed)  # Avalanche's buffers draw with the global generators
    learner, experiences = kind(optimizer, epochs), tasks_of(data.train, TASKS)
    matrix, seconds, figures = list[list[float | None]](), 0.0, Figures()
    if kind.joint:
        started = time.process_time()
        learner.learn(experiences)
        seconds = time.process_time() - started
    for learned in range(1, len(TASKS) + 1):
        if not kind.joint:
            started = time.process_time()
            learner.learn(experiences[learned - 1])
            seconds += time.process_time() - started
        elif learned < len(TASKS):
            continue
        known = data.class_ids < 2 * learned
        scores = scores_of(learner, data.test[known], 2 * learned)
        right = scores.argmax(1) == data.class_ids[known]
        task = data.class_ids[known] // 2
        matrix.append([float(right[task == number].mean()) for number in range(learned)])
        if learned == len(TASKS) - 1:
            figures |= unknown_figures(scores, scores_of(learner, data.test[~known], 2 * learned), "8, 9")
    foreign = scores_of(learner, data.foreign, CLASSES)
    return {
        "CIL %": 100 * float(right.mean()),
        "forgetting": 0.0 if kind.joint else 100 * forgetting(matrix),
        **unknown_figures(scores, foreign, "foreign"),
        **figures,
        "stored": float(kind.stored),
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
    parser.add_argument("--data", help="the folder that has or gets MNIST")
    parser.add_argument("--unknown", required=True, help="a folder of other images")
    parser.add_argument("--seed", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="strategies whose names contain one of these")
    return parser.parse_args()


def main() -> None:
    chosen = arguments()
    torch.set_num_threads(1)
    console, rows, failed = Console(width=220, highlight=False), dict[str, list[Figures]](), dict[str, str]()
    data, optimizers = read(chosen.data, chosen.unknown), dict[str, str]()
    for seed, kind in ((seed, kind) for seed in chosen.seed for kind in LEARNERS):
        if chosen.only is not None and not any(name in kind.name for name in chosen.only):
            continue
        try:
            if kind.name not in optimizers:
                optimizers[kind.name] = better_optimizer(kind, data, seed)
            figures = measure(kind, optimizers[kind.name], data, seed, chosen.epochs)
        except Exception as error:  # a strategy of another library, which may not run with these versions
            traceback.print_exc()
            failed[kind.name] = f"{type(error).__name__}: {error}"
            continue
        rows.setdefault(f"{kind.name}, {optimizers[kind.name]}", []).append(figures)
        console.print(f"seed {seed}, {kind.name}: {figures}")
    versions = ", ".join(f"{name} {version(name)}" for name in ("avalanche-lib", "torch"))
    seeds = ", ".join(map(str, chosen.seed))
    console.print(table(f"MNIST, five tasks, {chosen.epochs} epochs, {versions}, seeds {seeds}", rows))
    for name, reason in failed.items():
        console.print(f"{name} did not run: {reason}")


if __name__ == "__main__":
    main()
