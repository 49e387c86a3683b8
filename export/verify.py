"""Parity: the exported graphs say what the network with its masks says, or there is no bundle.

`python -m export.verify BUNDLE` checks a bundle again later: checksums, format and golden answers of every precision.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

from export.cascade import cascaded, rotated_outputs
from export.evidence import Evidence
from export.notes import note
from models.network import Network
from serving.bundle import Cascade, ImageSpec, load_bundle
from serving.decision import FEATURES, OUTPUT_NAMES, Outputs, Rule, Verdicts, complete, decide
from serving.layout import BundleError
from serving.runtime import Model
from training.decisions import Decider
from training.tasks import to_device, to_unit

BATCHES = (1, 7)
ALLOWED = 1e-3
"""Largest allowed |difference| / (1 + |value|) of any output; distances count in spreads of a task's own images."""
EXACT, EXACTLY = ("logits", "p_within_task"), 0.1
"""What no spread magnifies may differ by a tenth of that."""
AGREEING = {"label_agreement": 0.99, "unknown_agreement": 0.97}
"""The share of answers that a coarser precision must leave as they are.

Less for "unknown": the images that are compared are those that set the threshold, so some of them lie right on it.
"""
IMAGES_OF_TASK = "images_of_task_"
"""What the number of validation images of each task is recorded under."""
AUROC_CHANGE = 0.01
"""Of any one task: a mean would let one that gains hide one that loses."""


class ParityError(Exception):
    """The graph differs from the network; the message says where and by how much."""


def synthetic_images(image: ImageSpec, count: int) -> NDArray[np.uint8]:
    """Images that belong to nobody: smooth blobs, noise, black and white, the same each time."""
    generator = np.random.default_rng(0)
    rows, columns = np.mgrid[0 : image.height, 0 : image.width]
    pictures = [np.zeros(image.shape), np.full(image.shape, 255.0)]
    while len(pictures) < count:
        blobs = np.zeros(image.shape)
        for _ in range(3):
            y, x = generator.uniform(0, image.height), generator.uniform(0, image.width)
            radius = generator.uniform(0.08, 0.25) * max(image.height, image.width)
            shape = np.exp(-((rows - y) ** 2 + (columns - x) ** 2) / (2 * radius**2))
            blobs += shape[:, :, None] * generator.uniform(60, 255, size=image.channels)
        pictures.append(blobs + generator.uniform(0, 40, size=image.shape))
    images: NDArray[np.uint8] = np.clip(np.stack(pictures[:count]), 0, 255).astype(np.uint8)
    return images


def verify(
    network: Network,
    decider: Decider,
    pixels: NDArray[np.uint8],
    answers: Mapping[int, Outputs],
    cascade: Cascade,
    everyone: Outputs | None = None,
) -> dict[str, float]:
    """Compare a network with its fp32 graph's answers in batches of several sizes; the differences, or a ParityError.

    `everyone`, of a cascade, is what the graph says where every task sees all images turned: which tasks see these
    images is chance, and what a task says of turned ones must be right also where it sees none of them.

    Differences are relative, |difference| / (1 + |value|), and absolute; limits are set to the relative ones.
    """
    rule = decider.rule
    said = rotated_outputs(network, decider, pixels)
    expected = complete(cascaded(said, cascade.candidates, cascade.margin), rule)
    result: dict[str, float] = {"images": float(len(pixels)), "allowed": ALLOWED}
    features = standardised_features(network, pixels)
    for size, got in answers.items():
        result |= _differences(expected, got, rule, f"batch {size}")
        result |= _features_difference(features, got[FEATURES], f"batch {size}")
    if everyone is not None:
        result |= _differences(complete(said.full, rule), everyone, rule, "all turned")
    return result


def _differences(expected: Outputs, got: Outputs, rule: Rule, asked: str) -> dict[str, float]:
    """How far a graph's answers are from the network's, by output and by how it was asked."""
    result: dict[str, float] = {}
    for name in OUTPUT_NAMES:
        by_task = tuple(slice(task, task + 1) for task in range(len(rule.tasks)))
        columns = rule.columns if expected[name].shape[1] == len(rule.task_of_class) else by_task
        result |= _difference(name, expected[name], got[name], columns, asked)
    wanted, found = decide(expected, rule).class_id, decide(got, rule).class_id
    if (differing := wanted != found).any():
        raise ParityError(
            f"{asked}: {int(differing.sum())} of {len(wanted)} labels differ between network and graph, "
            f"the network's of {_named(rule.task_of_class[wanted[differing]])}; allowed 0"
        )
    result[f"label_agreement_{asked.replace(' ', '_')}"] = 1.0
    return result


def _features_difference(expected: Sequence[NDArray[Any]], got: NDArray[Any], asked: str) -> dict[str, float]:
    """The same of what the quarantine keeps of an image, task by task."""
    ends = np.cumsum([each.shape[1] for each in expected]).tolist()
    columns = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    if got.shape[1] != ends[-1]:
        raise ParityError(f"{FEATURES}, {asked}: {got.shape[1]} numbers an image; the network has {ends[-1]}")
    return _difference(FEATURES, np.concatenate(expected, axis=1), got, columns, asked)


@torch.no_grad()
def standardised_features(network: Network, pixels: NDArray[np.uint8]) -> list[NDArray[Any]]:
    """Every task's standardised features [n, features] of the upright images."""
    images = to_unit(to_device(pixels, next(network.parameters()).device))
    return [
        network.detector(task).tied.standardised(network.rotated_depths(images, task)[-1])[0].cpu().numpy()
        for task in range(len(network.heads))
    ]


def _difference(
    name: str, expected: NDArray[Any], got: NDArray[Any], columns: Sequence[slice], asked: str
) -> dict[str, float]:
    """The largest differences of an output, if those of every task's columns are allowed."""
    difference = np.abs(got - expected)
    relative = difference / (1 + np.abs(expected))
    allowed = ALLOWED * (EXACTLY if name in EXACT else 1)
    for task, own in enumerate(columns):
        # Written so that a NaN fails it too.
        if not (worst := float(relative[:, own].max())) <= allowed:
            raise ParityError(
                f"task {task}, {name}, {asked}: max |difference| / (1 + |value|) is {worst:.2g} > {allowed:g}"
            )
    how = asked.replace(" ", "_")
    return {
        f"{name}_difference_{how}": float(relative.max()),
        f"{name}_absolute_difference_{how}": float(difference.max()),
    }


def verify_precision(precision: str, exact: Outputs, got: Outputs, rule: Rule, evidence: Evidence) -> dict[str, float]:
    """Compare a coarser graph with the fp32 one on validation images; what was measured, or a ParityError."""
    wanted, found = decide(exact, rule), decide(got, rule)
    same = {"label_agreement": wanted.class_id == found.class_id, "unknown_agreement": wanted.known == found.known}
    result = {
        "images": float(len(evidence)),
        **{f"{IMAGES_OF_TASK}{task}": float((evidence.tasks == task).sum()) for task in range(len(rule.tasks))},
        **{name: float(alike.mean()) for name, alike in same.items()},
        "known_accepted": float(found.known.mean()),
        "known_accepted_fp32": float(wanted.known.mean()),
    }
    for name, least in AGREEING.items():
        if not result[name] >= least:
            differing = evidence.tasks[~same[name]]
            raise ParityError(
                f"{precision}: {name.replace('_', ' ')} with fp32 is {result[name]:.2%} < {least:.0%}: "
                f"{len(differing)} of {len(evidence)} images differ, of {_named(differing)}"
            )
    changes = _auroc_changes(wanted, found, evidence)
    result["tasks_with_auroc"] = float(len(changes))
    if changes:
        task = max(changes, key=lambda task: abs(changes[task]))
        result["mean_task_auroc_change"] = float(np.mean(list(changes.values())))
        result["largest_task_auroc_change"] = abs(changes[task])
        if not abs(changes[task]) <= AUROC_CHANGE:
            raise ParityError(
                f"{precision}: the AUROC of task {task} changes by {changes[task]:.4f} from fp32; "
                f"allowed {AUROC_CHANGE}"
            )
    else:
        note(f"{precision}: the AUROC of no task is measured: it takes validation images of two tasks")
    return result


def _auroc_changes(wanted: Verdicts, found: Verdicts, evidence: Evidence) -> dict[int, float]:
    """By task: how much better or worse its images are told from those of the other tasks."""
    changes = {}
    for task in map(int, np.unique(evidence.tasks)):
        if (others := evidence.tasks != task).any():
            before, now = (roc_auc_score(others, each.task_unknown_score[:, task]) for each in (wanted, found))
            changes[task] = float(now - before)
    return changes


def _named(tasks: NDArray[np.integer]) -> str:
    """Such as "task 0 (3), task 2 (1)"."""
    numbers, counts = np.unique(tasks, return_counts=True)
    return ", ".join(f"task {task} ({count})" for task, count in zip(numbers, counts, strict=True))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m export.verify", description="Check a bundle that was written.")
    parser.add_argument("bundle", type=Path, metavar="BUNDLE")
    chosen = parser.parse_args(arguments)
    try:
        bundle = load_bundle(chosen.bundle)
        bundle.check()
        for precision in bundle.manifest.precisions:
            Model.load(chosen.bundle, provider="cpu", precision=precision).self_test()
    except BundleError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    manifest = bundle.manifest
    print(
        f"{chosen.bundle}: {manifest.name} version {manifest.version}: {len(manifest.files)} checksums and "
        f"{len(bundle.golden.pixels)} golden answers in {', '.join(manifest.precisions)} are right"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
