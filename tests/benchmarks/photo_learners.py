"""Continual learners side by side on the same encoded photos and splits, one table per data set:

    python -m tests.benchmarks.photo_learners FOLDER:CLASSES_PER_TASK ... --trunk efficientnet-lite0 --seed 0 1 2

FOLDER is one that `openworld fit --data` reads. The seed shuffles the classes before they are cut into tasks; of a
folder without train/ and test/, it also draws the fifth of the photos that are for testing; with --images-per-class it
draws the photos that are learned from.

- CIL is the accuracy over all classes after the last task, and forgetting the mean loss of accuracy on a task since it
  was learned. Seconds are of the whole run.
- "memory, MB" is what the learner keeps to answer and to go on learning, as float32. It is not the size of a bundle,
  which also has the trunk.
- "own ms" is the processor time of the learner's own answer to one encoded photo, without the trunk, which all of them
  need; the title has the trunk's. Both are medians over photos one by one; set OMP_NUM_THREADS=1 to compare them.
- AUROC is measured when a quarter of the tasks, at least one, is not learned yet: known test photos against those of
  the unseen classes, and against photos of classes that only test/ has ("clutter"). Of ours, the shares at alpha 0.05
  are measured too; "least accepted" is the smallest share of known photos that were accepted after any task until then.

Methods without stored images come first, in the order of `tests.benchmarks.feature_learners`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from models.trunks.trunk import open_trunk
from serving.bundle.own_scores import threshold
from tests.benchmarks.feature_learners import ALPHA, LEARNERS, FeatureLearner, Ids, Ours
from training.data.class_folders import read_folder
from training.data.encoder import Encoder
from training.data.images import Images
from training.measure.metrics import forgetting
from training.show.console import Reporter

TEST_SHARE, UNSEEN_SHARE = 0.2, 0.25
Vectors = NDArray[np.float32]


class Part(NamedTuple):
    """Vectors [n, dim] and the numbers of their classes [n]; -1: a class that is never learned."""

    encoded: Vectors
    class_ids: Ids

    def of(self, classes: Iterable[int]) -> Part:
        rows = np.isin(self.class_ids, list(classes))
        return Part(self.encoded[rows], self.class_ids[rows])


class Split(NamedTuple):
    """The photos of one seed: class ids follow the order in which the classes are learned."""

    train: Part
    test: Part
    tasks: list[range]


@dataclass(frozen=True)
class Photos:
    """The encoded photos of a folder."""

    train: Images
    test: Images | None

    @classmethod
    def read(cls, folder: Path, encoder: Encoder) -> Photos:
        parts = [read_folder(folder / name, encoder).images for name in ("train", "test") if (folder / name).is_dir()]
        return cls(*parts) if len(parts) == 2 else cls(read_folder(folder, encoder).images, None)

    def split(self, per_task: int, per_class: int | None, seed: int) -> Split:
        train, test = (self.train, self.test) if self.test else self.train.split(TEST_SHARE, seed)
        generator = np.random.default_rng(seed)
        classes = generator.permutation(np.unique(train.labels)).tolist()
        place = {label: number for number, label in enumerate(classes)}
        parts = []
        for images in (train, test):
            ids = np.array([place.get(str(label), -1) for label in images.labels], np.int64)
            parts.append(Part(np.asarray(images.pixels, np.float32), ids))
        if per_class is not None:
            drawn = [generator.permutation(np.flatnonzero(parts[0].class_ids == each))[:per_class]
                     for each in range(len(classes))]  # fmt: skip
            rows = np.sort(np.concatenate(drawn))
            parts[0] = Part(parts[0].encoded[rows], parts[0].class_ids[rows])
        tasks = [range(len(classes))[start : start + per_task] for start in range(0, len(classes), per_task)]
        return Split(parts[0], parts[1], tasks)


Figures = dict[str, float]


def measure(kind: type[FeatureLearner], split: Split, seed: int) -> Figures:
    """The figures of one learner and seed."""
    tasks, unseen = split.tasks, max(1, round(UNSEEN_SHARE * len(split.tasks)))
    learner, matrix, seconds = kind(split.train.encoded.shape[1], seed), list[list[float | None]](), 0.0
    figures, shares = Figures(), list[float]()
    for learned in range(1, len(tasks) + 1):
        if kind.joint and learned not in (len(tasks) - unseen, len(tasks)):
            continue  # its other states are of no interest
        known = classes_of(tasks[:learned])
        started = time.perf_counter()
        # A joint learner begins anew with all images.
        learner = kind(learner.dim, seed) if kind.joint else learner
        learner.learn(*split.train.of(known if kind.joint else tasks[learned - 1]))
        seconds = (0.0 if kind.joint else seconds) + time.perf_counter() - started
        test = split.test.of(known)
        scores, unknown = learner.scores(test.encoded)
        right, task = scores.argmax(axis=1) == test.class_ids, test.class_ids // len(tasks[0])
        matrix.append([float(right[task == number].mean()) for number in range(learned)])
        shares.append(100 * float((unknown <= threshold(ALPHA)).mean()))
        if learned == len(tasks) - unseen:
            figures |= unknown_figures(learner, split, classes_of(tasks[-unseen:]), unknown, shares)
    return {
        "CIL %": 100 * float(right.mean()),
        "forgetting": 0.0 if kind.joint else 100 * forgetting(matrix),
        "stored": float(learner.stored),
        "seconds": seconds,
        "memory, MB": learner.bytes() / 1e6,
        "own ms": milliseconds(learner.scores, split.test.encoded),
        **figures,
    }


def milliseconds(answer: Callable[[Any], object], images: NDArray[Any], timed: int = 100, first: int = 5) -> float:
    """Median processor time of answering one image alone, after the `first` ones."""
    taken = []
    for place in range(first + timed):
        row = images[place % len(images)][None]
        started = time.process_time()
        answer(row)
        taken.append(time.process_time() - started)
    return 1000 * float(np.median(taken[first:]))


def trunk_milliseconds(encoder: Encoder) -> float:
    """The same of the trunk, for pixels of the size that it reads."""
    pixels = np.random.default_rng(0).integers(0, 256, (4, *encoder.image.shape), dtype=np.uint8)
    return milliseconds(encoder.encode, pixels, timed=20)


def unknown_figures(
    learner: FeatureLearner, split: Split, unseen: range, known: NDArray[Any], accepted: Sequence[float]
) -> Figures:
    """What tells known from unknown photos when some tasks are not learned yet; of ours also the shares at ALPHA."""
    figures = Figures()
    for name, part in (("unseen", split.test.of(unseen)), ("clutter", split.test.of([-1]))):
        if len(part.class_ids):
            scores = learner.scores(part.encoded)[1]
            figures[f"AUROC {name}"] = auroc(known, scores)
            if isinstance(learner, Ours):
                figures[f"{name} rejected %"] = 100 * float((scores > threshold(ALPHA)).mean())
    if isinstance(learner, Ours):
        figures |= {"accepted %": accepted[-1], "least accepted %": min(accepted)}
    return figures


def classes_of(tasks: Sequence[range]) -> range:
    """The classes of tasks that follow each other."""
    return range(tasks[0].start, tasks[-1].stop)


def auroc(known: NDArray[Any], unknown: NDArray[Any]) -> float:
    """The probability that an unknown image has the higher score; ties count half."""
    ranked = np.sort(known)
    below = sum(np.searchsorted(ranked, unknown, side=side) for side in ("left", "right"))  # type: ignore[call-overload]
    return float(below.mean() / (2 * len(known)))


def table(title: str, rows: dict[str, list[Figures]]) -> Table:
    """Mean and spread (standard deviation over seeds) of every figure."""
    names = list(dict.fromkeys(name for found in rows.values() for figures in found for name in figures))
    shown = Table("method", *names, title=title, title_justify="left")
    for method, found in rows.items():
        shown.add_row(method, *(cell([figures[name] for figures in found if name in figures], name) for name in names))
    return shown


def cell(values: Sequence[float], name: str) -> str:
    if not values:
        return "-"
    digits = 3 if name.startswith("AUROC") else 2 if name == "own ms" else 0 if name == "stored" else 1
    spread = f" ± {np.std(values, ddof=1):.{digits}f}" if len(values) > 1 and name != "stored" else ""
    return f"{np.mean(values):.{digits}f}{spread}"


def chosen_learners(names: Sequence[str] | None) -> Iterator[type[FeatureLearner]]:
    for kind in LEARNERS:
        if names is None or any(name in kind.name for name in names):
            yield kind


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.photo_learners", description=__doc__)
    parser.add_argument("data", nargs="+", metavar="FOLDER:CLASSES_PER_TASK")
    parser.add_argument("--trunk", default="efficientnet-lite0")
    parser.add_argument("--seed", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--images-per-class", type=int, help="learn from so many photos of each class")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="learners whose names contain one of these")
    chosen = parser.parse_args()
    encoder, console = Encoder(open_trunk(chosen.trunk), reporter=Reporter()), Console(width=200, highlight=False)
    torch.manual_seed(0)
    trunk_ms = trunk_milliseconds(encoder)
    for each in chosen.data:
        folder, _, per_task = each.rpartition(":")
        photos, rows = Photos.read(Path(folder), encoder), dict[str, list[Figures]]()
        for seed in chosen.seed:
            split = photos.split(int(per_task), chosen.images_per_class, seed)
            for kind in chosen_learners(chosen.only):
                rows.setdefault(kind.name, []).append(measure(kind, split, seed))
                console.print(f"{Path(folder).name}, seed {seed}, {kind.name}: {rows[kind.name][-1]}")
        few = "" if chosen.images_per_class is None else f", {chosen.images_per_class} photos per class"
        seeds = ", ".join(map(str, chosen.seed))
        trunk = f"{chosen.trunk} ({trunk_ms:.1f} ms per photo, for all methods)"
        title = f"{Path(folder).name}, {len(split.tasks)} tasks{few}, {trunk}, seeds {seeds}"
        console.print(table(title, rows))


if __name__ == "__main__":
    main()
