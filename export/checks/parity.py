"""Parity: the exported graphs give the same outputs as the network with its masks, or no bundle is written."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

from export.graph.cascade import cascaded, rotated_outputs
from export.graph.evidence import Evidence
from export.graph.notes import note
from models.network import Network
from serving.bundle.decision import FEATURES, OUTPUT_NAMES, Outputs, Rule, Verdicts, complete, decide
from serving.bundle.sections import Cascade, ImageSpec
from training.data.tasks import to_device, to_unit
from training.learn.decisions import Decider

BATCHES = (1, 7)
ALLOWED = 1e-3
"""Largest allowed |difference| / (1 + |value|) of any output; distances are in standard deviations of the scores."""
EXACT, EXACTLY = ("logits", "p_within_task"), 0.1
"""Outputs that are not standardised may differ by a tenth of that."""
AGREEING = {"label_agreement": 0.99, "unknown_agreement": 0.97}
"""The share of answers that a coarser precision must not change.

It is lower for "unknown": the compared images are those that set the threshold, so some of them lie right on it.
"""
IMAGES_OF_TASK = "images_of_task_"
"""Prefix of the entries with the number of validation images of each task."""
AUROC_CHANGE = 0.01
"""Largest change for any single task: in a mean, gains of one task could hide losses of another."""


class ParityError(Exception):
    """The graph differs from the network; the message has the place and the difference."""


def synthetic_images(image: ImageSpec, count: int) -> NDArray[np.uint8]:
    """Synthetic images: black, white, and smooth blobs with noise; the same each time."""
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
    return np.asarray(np.clip(np.stack(pictures[:count]), 0, 255), dtype=np.uint8)


def verify(
    network: Network,
    decider: Decider,
    pixels: NDArray[np.uint8],
    answers: Mapping[int, Outputs],
    cascade: Cascade,
    everyone: Outputs | None = None,
) -> dict[str, float]:
    """Compare a network with the outputs of its fp32 graph at several batch sizes; raises a ParityError.

    `everyone`, for a cascade, are the outputs when every task sees all rotations: which tasks a cascade evaluates on
    these images is chance, and the outputs for rotated images must be right for all tasks.

    Returns relative differences, |difference| / (1 + |value|), which are limited, and absolute ones.
    """
    rule = decider.rule
    rotated = rotated_outputs(network, decider, pixels)
    expected = complete(cascaded(rotated, cascade.candidates, cascade.margin), rule)
    result: dict[str, float] = {"images": float(len(pixels)), "allowed": ALLOWED}
    features = standardised_features(network, pixels)
    for size, got in answers.items():
        result |= _differences(expected, got, rule, f"batch {size}")
        result |= _features_difference(features, got[FEATURES], f"batch {size}")
    if everyone is not None:
        result |= _differences(complete(rotated.full, rule), everyone, rule, "all turned")
    return result


def _differences(expected: Outputs, got: Outputs, rule: Rule, asked: str) -> dict[str, float]:
    """The differences between the outputs of a graph and those of the network; `asked` names the batch size."""
    result: dict[str, float] = {}
    for name in OUTPUT_NAMES:
        by_task = tuple(slice(task, task + 1) for task in range(len(rule.tasks)))
        columns = rule.columns if expected[name].shape[1] == len(rule.task_of_class) else by_task
        result |= _difference(name, expected[name], got[name], columns, asked)
    wanted, found = decide(expected, rule).class_id, decide(got, rule).class_id
    if (differing := wanted != found).any():
        raise ParityError(
            f"{asked}: {int(differing.sum())} of {len(wanted)} labels differ between network and graph, "
            f"those of the network are of {_named(rule.task_of_class[wanted[differing]])}; allowed 0"
        )
    result[f"label_agreement_{asked.replace(' ', '_')}"] = 1.0
    return result


def _features_difference(expected: Sequence[NDArray[Any]], got: NDArray[Any], asked: str) -> dict[str, float]:
    """The largest difference of the features that the quarantine stores, task by task."""
    ends = np.cumsum([each.shape[1] for each in expected]).tolist()
    columns = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    if got.shape[1] != ends[-1]:
        raise ParityError(f"{FEATURES}, {asked}: {got.shape[1]} numbers per image; the network has {ends[-1]}")
    return _difference(FEATURES, np.concatenate(expected, axis=1), got, columns, asked)


@torch.no_grad()
def standardised_features(network: Network, pixels: NDArray[np.uint8]) -> list[NDArray[Any]]:
    """The standardised features [n, features] of the upright images, for every task."""
    images = to_unit(to_device(pixels, next(network.parameters()).device))
    return [
        network.detector(task).mahalanobis.standardised(network.live_features(images, task).deep)[0].cpu().numpy()
        for task in range(len(network.heads))
    ]


def _difference(
    name: str, expected: NDArray[Any], got: NDArray[Any], columns: Sequence[slice], asked: str
) -> dict[str, float]:
    """The largest differences of an output; raises a ParityError if those of a task are too large."""
    difference = np.abs(got - expected)
    relative = difference / (1 + np.abs(expected))
    allowed = ALLOWED * (EXACTLY if name in EXACT else 1)
    for task, own in enumerate(columns):
        # Written so that NaN fails as well.
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
    """Compare a coarser graph with the fp32 one on validation images; raises a ParityError."""
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
        note(f"{precision}: no AUROC was measured: that takes validation images of two tasks")
    return result


def _auroc_changes(wanted: Verdicts, found: Verdicts, evidence: Evidence) -> dict[int, float]:
    """Task -> the change of its AUROC against the images of the other tasks."""
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
