"""Parity: the exported graph says what the network with its masks says, or there is no bundle.

`python -m export.verify BUNDLE` checks a bundle again later: checksums, format and golden answers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from numpy.typing import NDArray

from models.network import Network
from serving.bundle import INPUT_NAME, BundleError, ImageSpec
from serving.decision import OUTPUT_NAMES, Outputs, Rule, decide
from serving.runtime import Model
from training.evaluate import all_outputs

BATCHES = (1, 7)
ALLOWED = 1e-4
"""Largest allowed |difference| / (1 + |value|) of any output."""


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


def open_session(graph: bytes) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    return ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


def run_graph(session: ort.InferenceSession, pixels: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
    return dict(zip(OUTPUT_NAMES, session.run(list(OUTPUT_NAMES), {INPUT_NAME: pixels}), strict=True))


def verify(network: Network, rule: Rule, graph: bytes, pixels: NDArray[np.uint8]) -> dict[str, float]:
    """Compare network and graph at several batch sizes; the largest differences, or a ParityError."""
    session = open_session(graph)
    expected = all_outputs(network, pixels, torch.device("cpu"))
    result: dict[str, float] = {"images": float(len(pixels)), "allowed": ALLOWED}
    for size in BATCHES:
        parts = [run_graph(session, pixels[start : start + size]) for start in range(0, len(pixels), size)]
        got = {name: np.concatenate([part[name] for part in parts]) for name in OUTPUT_NAMES}
        for name in OUTPUT_NAMES:
            result[f"{name}_difference_batch_{size}"] = _largest_difference(name, size, expected, got, rule)
        _compare_labels(size, expected, got, rule)
    return result


def _largest_difference(name: str, size: int, expected: Outputs, got: Mapping[str, NDArray[Any]], rule: Rule) -> float:
    difference = np.abs(got[name] - expected[name]) / (1 + np.abs(expected[name]))
    for task, own in enumerate(rule.columns):
        # Written so that a NaN fails it too.
        if not (worst := float(difference[:, own].max())) <= ALLOWED:
            raise ParityError(
                f"task {task}, {name}, batch {size}: max |difference| / (1 + |value|) is {worst:.2g} > {ALLOWED:g}"
            )
    return float(difference.max())


def _compare_labels(size: int, expected: Outputs, got: Outputs, rule: Rule) -> None:
    wanted, found = decide(expected, rule).class_id, decide(got, rule).class_id
    if differing := int((wanted != found).sum()):
        raise ParityError(f"batch {size}: {differing} of {len(wanted)} labels differ between network and graph")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m export.verify", description="Check a bundle that was written.")
    parser.add_argument("bundle", type=Path, metavar="BUNDLE")
    chosen = parser.parse_args(arguments)
    try:
        model = Model.load(chosen.bundle, provider="cpu")
        model.self_test()
    except BundleError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    files, images = len(model.manifest.files), len(model.bundle.golden.pixels)
    print(
        f"{chosen.bundle}: {model.manifest.name} version {model.manifest.version}: "
        f"{files} checksums and {images} golden answers are right"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
