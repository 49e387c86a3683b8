"""Memory of a run with many photos: `python -m tests.benchmarks.many_photos --photos 100000`.

Small photo files are written, and encoded by a trunk whose vectors are as long as those of the default trunk but which
takes little time. The run learns them in tasks of ten classes; the largest memory of its process is printed.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from models.trunks.cache_settings import FOLDER_VARIABLE
from tests.helpers_serving import ROOT

SIDE, CHANNELS = 32, 128
"""128 channels in 4x4 places are vectors of 2048 numbers."""
CLASSES = 100


def write_extractor(path: Path) -> None:
    weight = np.random.default_rng(0).normal(size=(CHANNELS, 3, 8, 8)).astype(np.float32)
    nodes = [
        helper.make_node("Conv", ["images", "weight"], ["maps"], strides=[8, 8]),
        helper.make_node("Flatten", ["maps"], ["features"]),
    ]
    images = helper.make_tensor_value_info("images", TensorProto.FLOAT, ["n", 3, SIDE, SIDE])
    features = helper.make_tensor_value_info("features", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "mine", [images], [features], [numpy_helper.from_array(weight, "weight")])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), path)


def write_photos(folder: Path, count: int) -> None:
    random = np.random.default_rng(0)
    colours = random.integers(0, 256, (CLASSES, 4, 4, 3))
    for label in range(CLASSES):
        place = folder / f"{label:03}"
        place.mkdir(parents=True)
        for number in range(count // CLASSES):
            coarse = np.clip(colours[label] + random.normal(0, 40, (4, 4, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(coarse).resize((48, 40)).save(place / f"{number}.jpg", quality=80)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the memory of a run with many photos.")
    parser.add_argument("--photos", type=int, default=100_000)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        place = Path(made)
        write_extractor(place / "trunk.onnx")
        write_photos(place / "photos", chosen.photos)
        words = ["fit", "--data", str(place / "photos"), "--trunk", f"onnx:{place / 'trunk.onnx'}", "--quick"]
        words += ["--classes-per-task", "10", "--out", str(place / "run")]
        environment = {**os.environ, FOLDER_VARIABLE: str(place / "cache")}
        started = time.perf_counter()
        subprocess.run([sys.executable, "-m", "export.cli", *words], cwd=ROOT, env=environment, check=True)
        seconds = time.perf_counter() - started
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    print(f"{chosen.photos} photos: {peak:.0f} MB at the peak, {seconds:.0f} s")


if __name__ == "__main__":
    main()
