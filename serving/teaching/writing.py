"""From knowledge to a bundle on disk: complete under its name, or not there at all.

Files that are the same as in the bundle before are linked and not copied, so that a version of a bundle takes little
more than what was taught. Bundles never change once they are written.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.bundle.decision import OUTPUT_NAMES, complete
from serving.bundle.directory import WriteError, fresh_directory, move_into_place, recover
from serving.bundle.embedding import PER_CLASS, Embedding
from serving.bundle.layout import (
    EMBEDDING,
    GOLDEN,
    MANIFEST,
    MAPS,
    POOLED,
    RULE,
    STATISTICS,
    adapter_name,
    detector_name,
    extension_name,
    lesson_name,
)
from serving.bundle.lessons import archive
from serving.bundle.manifest import Bundle, Golden, Manifest, load_bundle, seal, sha256
from serving.bundle.model import BundleModel
from serving.bundle.pooled_model import weight_arrays
from serving.bundle.run_verdict import TaughtVerdict
from serving.bundle.sections import ConsolidatedInfo, FileInfo, LessonInfo, TaskInfo
from serving.teaching.curriculum import Task
from serving.teaching.errors import TeachError
from serving.teaching.learning import Knowledge

UNFINISHED = "teaching"
"""Part of the names of the folders of unfinished bundles on a shelf, so that the next lesson finds them."""


@dataclass(frozen=True)
class Written:
    """The content of a bundle: its manifest, new files by name, and files to take from the bundle before."""

    manifest: Manifest
    files: dict[str, bytes]
    same: dict[str, str]
    """Name -> name in the bundle before."""


def compose(before: BundleModel, knowledge: Knowledge, verdicts: Sequence[TaughtVerdict]) -> Written:
    """The bundle of what was learned; `before` is the model that it continues, whose trunk it shares.

    `verdicts` are those on classes with examples (`taught_verdicts`).
    """
    bundle, manifest = before.bundle, before.manifest
    model, rule = knowledge.model, knowledge.rule(bundle.rule)
    answers = {}
    for precision in manifest.precisions:
        trunk = (
            before
            if before.precision == precision
            else BundleModel.load(bundle.path, provider="cpu", precision=precision)
        )
        outputs = complete(model.outputs(trunk.encode(bundle.golden.pixels, model.rotations)), rule)
        answers[precision] = {name: outputs[name].astype(np.float32) for name in OUTPUT_NAMES}
    golden = Golden(bundle.golden.pixels, answers)
    contents = {
        POOLED: archive({**knowledge.classifier.to_arrays(), **weight_arrays(model)}),
        STATISTICS: archive(knowledge.curriculum.teachable.to_arrays()),
        **{detector_name(number): archive(_arrays(task)) for number, task in enumerate(knowledge.tasks)},
    }
    for number, group in enumerate(knowledge.curriculum.adapted):
        contents[adapter_name(number)] = archive(group.to_arrays())
    if (found := bundle.embedding()) is not None:
        contents[EMBEDDING] = archive(_mapped(found.of_classes(_numbers(manifest, knowledge)), knowledge).to_arrays())
    for number, taught in enumerate(knowledge.taught):
        contents[lesson_name(number)] = archive(taught.lesson.to_arrays())
    for number, extension in knowledge.extensions.items():
        contents[extension_name(number)] = archive(extension.to_arrays())
    described = {name: FileInfo(sha256=sha256(content), size=len(content)) for name, content in contents.items()}
    for name in map(manifest.graph_file, manifest.precisions):
        described[name] = manifest.files[name]
    if MAPS in manifest.files:
        # Explanations of what was taught need the feature maps, too.
        described[MAPS] = manifest.files[MAPS]
    kept = {
        name: getattr(manifest, name)
        for name in (
            *("name", "method", "preset", "seed", "image", "trunk", "origin"),
            *("cascade", "verdict", "metrics", "versions"),
        )
    }
    sealed, small = seal(
        rule,
        golden,
        described,
        **kept,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        tasks=_tasks(knowledge, described, bundle),
        lessons=_lessons(knowledge),
        taught=tuple(verdicts),
        consolidated=tuple(
            ConsolidatedInfo(labels=each.labels, images=each.images, weight=each.weight)
            for each in knowledge.curriculum.adapted
        ),
        before=manifest.version,
        verification=manifest.verification,
    )
    files = {**contents, **small}
    earlier = {info.sha256: name for name, info in manifest.files.items()}
    same = {
        name: earlier[info.sha256]
        for name, info in sealed.files.items()
        if info.sha256 in earlier and name not in (RULE, GOLDEN)
    }
    return Written(sealed, {name: content for name, content in files.items() if name not in same}, same)


def _numbers(before: Manifest, knowledge: Knowledge) -> dict[int, int]:
    """The number of each class of the run in the bundle before -> its number now, without deleted classes."""
    taught = {lesson.task for lesson in before.lessons}
    run = [
        task.first_class_id + number
        for task in before.tasks
        if task.task not in taught
        for number in range(len(task.labels))
    ]
    now = knowledge.curriculum.run_labels
    if len(run) == len(now):
        return {number: number for number in run}
    return {number: now.index(label) for number in run if (label := before.labels[number]) in now}


def _mapped(run: Embedding, knowledge: Knowledge) -> Embedding:
    """The map of the classes of the run, with some examples of each class that was taught since."""
    found, first = run, len(knowledge.curriculum.run_labels)
    for number, label in enumerate(knowledge.labels[first:], first):
        rows = [lesson.vectors[label] for lesson in knowledge.curriculum.lessons if label in lesson.vectors]
        examples = np.concatenate(rows)[:PER_CLASS]
        found = found.with_images(examples, np.full(len(examples), number))
    return found


def _arrays(task: Task) -> dict[str, NDArray[Any]]:
    """What the file of a task stores."""
    return {**task.detector.to_arrays(), **(task.adapter.to_arrays() if task.adapter is not None else {})}


def _tasks(knowledge: Knowledge, files: dict[str, FileInfo], before: Bundle) -> tuple[TaskInfo, ...]:
    found, first = [], 0
    for number, task in enumerate(knowledge.tasks):
        part = detector_name(number)
        found.append(
            TaskInfo(
                task=number,
                first_class_id=first,
                labels=task.labels,
                calibration=None,
                own_images=task.rule.images,
                parts=(part,),
                unchanged=before.manifest.files.get(part) == files[part],
            )
        )
        first += len(task.labels)
    return tuple(found)


def _lessons(knowledge: Knowledge) -> tuple[LessonInfo, ...]:
    found, number = [], len(knowledge.curriculum.tasks)
    for taught, examples in zip(knowledge.taught, knowledge.curriculum.lessons, strict=True):
        task = None
        if taught.task is not None:
            task, number = number, number + 1
        found.append(
            LessonInfo(
                task=task,
                images=examples.images,
                extends=taught.extends,
                taught_by=examples.taught_by,
                taught_at=examples.taught_at,
            )
        )
    return tuple(found)


def write(written: Written, before: Bundle, place: Path, unfinished: str | None = None) -> None:
    """Write a bundle to its place, where it appears complete or not at all; `unfinished` is part of the name of its
    folder until then, that of its place by default."""
    try:
        with fresh_directory(place.parent, unfinished or place.name) as fresh:
            for name, source in written.same.items():
                _link(before.path / source, fresh / name)
            for name, content in written.files.items():
                (fresh / name).write_bytes(content)
            move_into_place(fresh, place)
    except WriteError as error:
        raise TeachError(str(error)) from error
    except OSError as error:
        raise TeachError(f"{place}: the bundle cannot be written: {error.strerror or error}") from error


def put_beside(written: Written, before: Bundle, shelf: Path) -> Path:
    """Write a bundle to a shelf, under the name of its version. It is not served until the shelf points at it."""
    place = shelf / written.manifest.version
    if (place / MANIFEST).is_file():
        load_bundle(place).check()
    else:
        write(written, before, place, UNFINISHED)
    return place


def remove_unfinished(shelf: Path) -> None:
    """Remove what killed processes have left on a shelf."""
    recover(shelf, UNFINISHED)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source.resolve(), target)
    except OSError:
        # Another file system, or one without links.
        shutil.copyfile(source, target)
