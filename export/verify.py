"""Parity: the exported graphs say what the network with its masks says, or there is no bundle.

`python -m export.verify BUNDLE` checks a bundle again later: checksums, format and golden answers of every precision.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

from export.cascade import cascaded, rotated_outputs
from export.evidence import Evidence
from export.opened import TaskByTask, run_graph
from models.network import Network
from serving.bundle import BundleError, Cascade, ImageSpec, load_bundle
from serving.decision import OUTPUT_NAMES, Outputs, Rule, complete, decide
from serving.runtime import Model
from training.decisions import Decider

BATCHES = (1, 7)
ALLOWED = 1e-3
"""Largest allowed |difference| / (1 + |value|) of any output; distances count in spreads of a task's own images."""
EXACT, EXACTLY = ("logits", "p_within_task"), 0.1
"""What no spread magnifies may differ by a tenth of that."""
AGREEING = {"label_agreement": 0.99, "unknown_agreement": 0.97}
"""The share of answers that a coarser precision must leave as they are.

Less for "unknown": the images that are compared are those that set the threshold, so some of them lie right on it.
"""
AUROC_CHANGE = 0.01


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
    session: ort.InferenceSession | TaskByTask,
    pixels: NDArray[np.uint8],
    cascade: Cascade,
) -> dict[str, float]:
    """Compare network and fp32 graph at several batch sizes; the largest differences, or a ParityError."""
    rule = decider.rule
    said = rotated_outputs(network, decider, pixels)
    expected = complete(cascaded(said, cascade.candidates, cascade.margin), rule)
    result: dict[str, float] = {"images": float(len(pixels)), "allowed": ALLOWED}
    for size in BATCHES:
        got = run_graph(session, pixels, size)
        for name in OUTPUT_NAMES:
            result[f"{name}_difference_batch_{size}"] = _largest_difference(name, size, expected, got, rule)
        wanted, found = decide(expected, rule).class_id, decide(got, rule).class_id
        if differing := int((wanted != found).sum()):
            raise ParityError(f"batch {size}: {differing} of {len(wanted)} labels differ between network and graph")
        result[f"label_agreement_batch_{size}"] = 1.0
    return result


def _largest_difference(name: str, size: int, expected: Outputs, got: Mapping[str, NDArray[Any]], rule: Rule) -> float:
    difference = np.abs(got[name] - expected[name]) / (1 + np.abs(expected[name]))
    allowed = ALLOWED * (EXACTLY if name in EXACT else 1)
    columns = rule.columns if expected[name].shape[1] == len(rule.task_of_class) else range(len(rule.tasks))
    for task, own in enumerate(columns):
        # Written so that a NaN fails it too.
        if not (worst := float(difference[:, own].max())) <= allowed:
            raise ParityError(
                f"task {task}, {name}, batch {size}: max |difference| / (1 + |value|) is {worst:.2g} > {allowed:g}"
            )
    return float(difference.max())


def verify_precision(precision: str, exact: Outputs, got: Outputs, rule: Rule, evidence: Evidence) -> dict[str, float]:
    """Compare a coarser graph with the fp32 one on validation images; what was measured, or a ParityError."""
    wanted, found = decide(exact, rule), decide(got, rule)
    result = {
        "images": float(len(evidence)),
        "label_agreement": float((wanted.class_id == found.class_id).mean()),
        "unknown_agreement": float((wanted.known == found.known).mean()),
        "known_accepted": float(found.known.mean()),
        "known_accepted_fp32": float(wanted.known.mean()),
    }
    for name, least in AGREEING.items():
        if not result[name] >= least:
            raise ParityError(f"{precision}: {name.replace('_', ' ')} with fp32 is {result[name]:.2%} < {least:.0%}")
    changes = [
        roc_auc_score(evidence.tasks != task, found.task_unknown_score[:, task])
        - roc_auc_score(evidence.tasks != task, wanted.task_unknown_score[:, task])
        for task in np.unique(evidence.tasks)
        if (evidence.tasks != task).any()
    ]
    if changes:
        result["task_auroc_change"] = float(np.mean(changes))
        if not abs(result["task_auroc_change"]) <= AUROC_CHANGE:
            raise ParityError(f"{precision}: mean task AUROC changes by {np.mean(changes):.4f}; allowed {AUROC_CHANGE}")
    return result


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
