"""What each part of the recipe for an int8 trunk is worth: `python -m tests.benchmarks.trunk_precision FOLDER`.

Some photos of every class folder are encoded by the default trunk in fp32 and by variants of int8. Six of ten photos
fit a linear classifier, some of these set the ranges, and the other four judge: the share that gets the same class as
in fp32, the mean length of the difference of the vectors, which have length 1, and the processor time of one photo.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import onnx
from numpy.typing import NDArray

from export.graph import trunk_int8, trunk_ranges
from models.trunks import DEFAULT_TRUNK
from models.trunks.trunk import INPUT, OUTPUT, open_trunk
from serving.bundle.manifest import Graph
from serving.bundle.pixels import open_image, to_pixels
from serving.bundle.sections import ImageSpec
from serving.bundle.session import open_session, session_options
from tests.benchmarks.conftest import table
from tests.benchmarks.timing import take_turns

SHRINKAGE, ROUNDS = 0.35, 15

Vectors = NDArray[np.float32]
Classify = Callable[[Vectors], NDArray[np.int64]]


@contextmanager
def unchanged() -> Iterator[None]:
    yield


def no_shift(model: onnx.ModelProto, shift: Vectors) -> bytes:
    return bytes(model.SerializeToString(deterministic=True))


def no_correction(writer: object, node: object, error: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.zeros(len(error))


VARIANTS: dict[str, Callable[[], object]] = {
    "the recipe": unchanged,
    "1 layer in fp32 instead of 3": partial(mock.patch.object, trunk_int8, "FIRST", 1),
    "ranges up to the extremes": partial(mock.patch.object, trunk_ranges, "CUTS", np.array([1.0])),
    "no constant added to the vector": partial(mock.patch.object, trunk_int8, "_shifted", no_shift),
    "no correction of the bias": partial(mock.patch.object, trunk_int8._Int8Writer, "_mean_error", no_correction),
    "7 bits for depthwise weights too": partial(mock.patch.object, trunk_int8, "LARGEST_DEPTHWISE", 63),
}


def read(folder: Path, per_class: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    size = open_trunk(DEFAULT_TRUNK).spec.size
    spec = ImageSpec(height=size, width=size, mode="RGB")
    folders = sorted(path for path in folder.iterdir() if path.is_dir())
    chosen = [(file, number) for number, each in enumerate(folders) for file in sorted(each.iterdir())[:per_class]]
    pixels = np.stack([to_pixels(open_image(file.read_bytes()), spec) for file, _ in chosen])
    return pixels, np.array([number for _, number in chosen])


def encode(content: bytes, pixels: NDArray[np.uint8]) -> Vectors:
    session = open_session(Graph(content, {}), session_options(1))
    return np.concatenate([session.run([OUTPUT], {INPUT: pixels[at : at + 16]})[0] for at in range(0, len(pixels), 16)])


def classifier(vectors: Vectors, classes: NDArray[np.int64]) -> Classify:
    """Linear discriminant analysis with one shrunk covariance."""
    found = np.unique(classes)
    means = np.stack([vectors[classes == each].mean(axis=0, dtype=np.float64) for each in found])
    rest = vectors - means[np.searchsorted(found, classes)]
    covariance = rest.T @ rest / len(rest)
    shrunk = (1 - SHRINKAGE) * covariance + SHRINKAGE * np.diag(np.diag(covariance))
    weights = np.linalg.solve(shrunk, means.T)
    bias = -0.5 * (means.T * weights).sum(axis=0)
    return lambda some: np.asarray(found[(some @ weights + bias).argmax(axis=1)])


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare variants of an int8 trunk.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--per-class", type=int, default=10)
    chosen = parser.parse_args()
    pixels, classes = read(chosen.folder, chosen.per_class)
    model = onnx.load_from_string(open_trunk(DEFAULT_TRUNK).model)
    fp32 = model.SerializeToString()
    exact = encode(fp32, pixels)
    place = np.arange(len(pixels)) % 10
    judged = place >= 6  # the other six of ten fit the classifier, and two of these set the ranges
    classify = classifier(exact[~judged], classes[~judged])
    wanted = classify(exact[judged])
    rows = []
    for name, variant in VARIANTS.items():
        with variant():  # type: ignore[attr-defined]
            content = trunk_int8.quantize(model, pixels[place % 6 == 1])
        vectors = encode(content, pixels[judged])
        same = float(np.mean(classify(vectors) == wanted))
        error = float(np.linalg.norm(vectors - exact[judged], axis=1).mean())
        taken = timed({each: runner(part, pixels[:1]) for each, part in (("fp32", fp32), ("int8", content))})
        rows.append((name, f"{same:.2%}", f"{error:.4f}", f"{taken['fp32'] / taken['int8']:.2f}"))
        print(rows[-1], flush=True)
    print(table((f"{int(judged.sum())} photos", "same class as fp32", "difference", "times as fast"), rows))


def runner(content: bytes, pixels: NDArray[np.uint8]) -> Callable[[], object]:
    return partial(open_session(Graph(content, {}), session_options(1)).run, [OUTPUT], {INPUT: pixels})


def timed(works: dict[str, Callable[[], object]]) -> dict[str, float]:
    return {name: taken.processor for name, taken in take_turns(works, ROUNDS).items()}


if __name__ == "__main__":
    main()
