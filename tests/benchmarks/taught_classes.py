"""Classes that are taught to a server, against learning them by a run from the same photos:

    python -m tests.benchmarks.taught_classes FOLDER --trunk efficientnet-lite0 --seed 0 1 2

FOLDER has train/ and test/ with a folder per class, as `openworld fit --data` reads it. The seed shuffles the classes
and draws the photos. The first --learned classes are learned by a run, ten per task, from all their photos. Then
--taught further classes follow, from --images photos each, in four ways: as tasks of the run, in one lesson, in lessons
of two classes, and in lessons of one. A row says how well all classes are told apart on test photos (CIL), what the
classes of the run have lost, how well photos of classes that only test/ has ("clutter") are told from known ones, and
what a lesson takes. `gate` are the points that the trial before publishing expects the classes of the run to lose.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table
from sklearn.metrics import roc_auc_score

from models.trunks.trunk import open_trunk
from serving.bundle.decision import Rule, judge
from serving.bundle.lessons import Teachable
from serving.bundle.pooled import ChoiceMemory, LearnedTask, Statistics, learn_task, projection_for
from serving.bundle.pooled.factors import ClassFactors
from serving.bundle.pooled_model import PooledModel
from serving.teaching.curriculum import Curriculum, Examples, Task
from serving.teaching.learning import Knowledge, learn
from serving.teaching.trial import try_out
from tests.benchmarks.photo_learners import Part, Photos, Split
from training.data.encoder import Encoder

ALPHA, PER_TASK = 0.05, 10


class Row(NamedTuple):
    """Measured on test photos; shares of 100."""

    cil: float
    old: float
    known: float
    rejected: float
    clutter: float
    seconds: float
    gate: float


class Run:
    """The classes that a run has learned, ten per task."""

    def __init__(self, dim: int) -> None:
        projection = projection_for(dim)
        self.statistics, self.memory = Statistics(projection), ChoiceMemory()
        self.factors = ClassFactors(projection)
        self.tasks: list[Task] = []
        self.learned: LearnedTask | None = None

    def add(self, part: Part) -> None:
        """Learn one more task."""
        seed = len(self.tasks)
        earlier = [task.frozen for task in self.tasks]
        self.learned = learn_task(self.statistics, self.memory, part.encoded, part.class_ids, seed, earlier)
        self.statistics, self.memory = self.learned.statistics, self.learned.memory
        self.factors = self.factors.with_classes(part.encoded, part.class_ids)
        classes = np.unique(part.class_ids)
        self.tasks.append(Task(tuple(map(str, classes)), self.learned.detector, self.learned.rule))

    @property
    def model(self) -> PooledModel:
        assert self.learned is not None
        return PooledModel(self.learned.classifier, tuple(task.detector for task in self.tasks))

    @property
    def rule(self) -> Rule:
        rules = tuple(task.rule for task in self.tasks)
        return Rule(score="pooled", alpha=ALPHA, tasks=rules, joint=True, expectation=True)

    @property
    def curriculum(self) -> Curriculum:
        assert self.learned is not None
        teachable = Teachable(self.factors, self.memory, self.learned.classifier.settings)
        return Curriculum(tuple(self.tasks), teachable, (), ())


def lesson(part: Part, classes: Sequence[int]) -> Examples:
    given = {
        str(number): [(hashlib.sha256(row.tobytes()).hexdigest(), row) for row in part.of([number]).encoded]
        for number in classes
    }
    return Examples.of(given, "bench", "")


def measure(model: PooledModel, rule: Rule, test: Part, old: int, classes: Sequence[int]) -> Row:
    """Columns of the model are `classes`."""
    known = test.of(list(classes))
    verdicts = judge(model.outputs(known.encoded), rule)
    right = np.array(classes)[verdicts.class_id] == known.class_ids
    strange = judge(model.outputs(test.encoded[test.class_ids == -1]), rule)
    truth = np.concatenate([np.zeros(len(right)), np.ones(len(strange.known))])
    auroc = roc_auc_score(truth, np.concatenate([verdicts.unknown_score, strange.unknown_score]))
    of_old = known.class_ids < old
    return Row(
        100 * right.mean(),
        100 * right[of_old].mean(),
        100 * verdicts.known.mean(),
        100 * (1 - strange.known.mean()),
        100 * auroc,
        0.0,
        0.0,
    )


def taught(run: Run, new: Part, groups: list[list[int]]) -> tuple[Knowledge, float, float]:
    """After lessons of these classes; the mean seconds per lesson, and what the trial of all of them expects."""
    before = learn(run.curriculum)
    curriculum, started = run.curriculum, time.perf_counter()
    for classes in groups:
        knowledge = learn(curriculum.taught(lesson(new, classes)))
        curriculum = knowledge.learned_curriculum
    seconds = (time.perf_counter() - started) / len(groups)
    trial = try_out(before, knowledge, (run.rule, knowledge.rule(run.rule)), np.empty((0, new.encoded.shape[1]), "f4"))
    images = sum(each.images for each in trial.old.measured)
    lost = 100 * sum(each.before - each.after for each in trial.old.measured) / images
    return knowledge, seconds, lost


def rows(split: Split, learned: int, more: int, images: int, seed: int) -> dict[str, Row]:
    run = Run(split.train.encoded.shape[1])
    for start in range(0, learned, PER_TASK):
        run.add(split.train.of(range(start, start + PER_TASK)))
    old, every = list(range(learned)), list(range(learned + more))
    found = {"before": measure(run.model, run.rule, split.test, learned, old)}
    new = few(split.train.of(range(learned, learned + more)), images, seed)
    for name, size in (("one lesson", more), ("lessons of 2", 2), ("lessons of 1", 1)):
        groups = [every[start : start + size] for start in range(learned, learned + more, size)]
        knowledge, seconds, lost = taught(run, new, groups)
        columns = [int(label) for label in knowledge.labels]
        row = measure(knowledge.model, knowledge.rule(run.rule), split.test, learned, columns)
        found[name] = row._replace(seconds=seconds, gate=lost)
    started = time.perf_counter()
    for start in range(learned, learned + more, PER_TASK):
        run.add(new.of(range(start, start + PER_TASK)))
    seconds = (time.perf_counter() - started) / (more / PER_TASK)
    found["by the run"] = measure(run.model, run.rule, split.test, learned, every)._replace(seconds=seconds)
    return found


def few(part: Part, images: int, seed: int) -> Part:
    generator = np.random.default_rng(seed)
    kept = [generator.permutation(np.flatnonzero(part.class_ids == n))[:images] for n in np.unique(part.class_ids)]
    chosen = np.sort(np.concatenate(kept))
    return Part(part.encoded[chosen], part.class_ids[chosen])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trunk", default="efficientnet-lite0")
    parser.add_argument("--seed", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--learned", type=int, default=60)
    parser.add_argument("--taught", type=int, default=20)
    parser.add_argument("--images", type=int, default=10)
    options = parser.parse_args()
    photos = Photos.read(options.folder, Encoder(open_trunk(options.trunk)))
    found: dict[str, list[Row]] = {}
    for seed in options.seed:
        split = photos.split(PER_TASK, None, seed)
        for name, row in rows(split, options.learned, options.taught, options.images, seed).items():
            found.setdefault(name, []).append(row)
    heads = ("CIL", "CIL of the run's", "known accepted", "clutter rejected", "clutter AUROC", "s per lesson", "gate")
    table = Table("taught", *heads, title=f"{options.folder.name}, {options.trunk}, seeds {options.seed}")
    for name, each in found.items():
        values = np.array(each)
        table.add_row(name, *(f"{m:.2f} ± {s:.2f}" for m, s in zip(values.mean(0), values.std(0), strict=True)))
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
