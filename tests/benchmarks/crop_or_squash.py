"""Whether oblong photos are cropped or squashed to a square: `python -m tests.benchmarks.crop_or_squash FOLDER`.

Some photos of every class folder are encoded by the default trunk in both ways. Five folds judge each by linear
discriminant analysis, as a run does. Give it training photos: this is a choice, and test photos must not make it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from models.trunks import DEFAULT_TRUNK
from models.trunks.trunk import open_trunk
from serving.bundle.pixels import open_image, plain, to_pixels
from serving.bundle.sections import ImageSpec
from tests.benchmarks.trunk_precision import classifier, encode

FOLDS = 5
Pixels = NDArray[np.uint8]


def cropped(content: bytes, spec: ImageSpec) -> Pixels:
    return to_pixels(open_image(content), spec)


def squashed(content: bytes, spec: ImageSpec) -> Pixels:
    size = spec.width, spec.height
    return np.asarray(plain(open_image(content), spec.mode, size).resize(size, Image.Resampling.BILINEAR))


WAYS: dict[str, Callable[[bytes, ImageSpec], Pixels]] = {"cropped": cropped, "squashed": squashed}


def right(vectors: NDArray[np.float32], classes: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which photos get their class from the photos of the other folds."""
    fold = np.random.default_rng(0).permutation(len(classes)) % FOLDS
    found = np.empty_like(classes)
    for number in range(FOLDS):
        out = fold == number
        found[out] = classifier(vectors[~out], classes[~out])(vectors[out])
    return np.asarray(found == classes)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare cropped and squashed photos.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--per-class", type=int, default=10)
    chosen = parser.parse_args()
    trunk = open_trunk(DEFAULT_TRUNK)
    spec = ImageSpec(height=trunk.spec.size, width=trunk.spec.size, mode="RGB")
    folders = sorted(path for path in chosen.folder.iterdir() if path.is_dir())
    files = [
        (file, number) for number, each in enumerate(folders) for file in sorted(each.iterdir())[: chosen.per_class]
    ]
    contents, classes = [file.read_bytes() for file, _ in files], np.array([number for _, number in files])
    found = {}
    for name, way in WAYS.items():
        vectors = encode(trunk.model, np.stack([way(content, spec) for content in contents]))
        found[name] = right(vectors, classes)
        print(f"{name}: {found[name].mean():.2%} of {len(files)} photos of {len(folders)} classes by {FOLDS} folds")
    only = [int((one & ~other).sum()) for one, other in (tuple(found.values()), tuple(found.values())[::-1])]
    print(f"right only if cropped: {only[0]}; only if squashed: {only[1]}")


if __name__ == "__main__":
    main()
