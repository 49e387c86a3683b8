"""Export a large network as `python -m export` does, in a separate process, and print the memory that it took.

`python -m tests.benchmarks.export_memory sup 128 20`: method, width and tasks; a fourth number makes it a cascade in
which so many tasks see an image turned.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

import numpy as np

from export.checks import parity
from export.exporter import Exporter
from export.graph.evidence import Evidence
from serving.bundle.sections import Cascade
from tests.benchmarks.exported import NO_IMAGES, NO_ORIGIN, NO_QUALITY, random_run, resnet

ALLOWED = 0.1


def peak_megabytes() -> float:
    """The peak memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(method: str, width: int, tasks: int, candidates: int | None = None) -> None:
    started = time.perf_counter()
    run = random_run(resnet(method, width), tasks)
    before, ready = peak_megabytes(), time.perf_counter()
    # What was never learned is verified as usual, but a few images far from everything do not agree as closely.
    with tempfile.TemporaryDirectory() as folder, patch.object(parity, "ALLOWED", ALLOWED):
        exporter = Exporter(
            run, Path(folder), Evidence(NO_IMAGES, np.empty(0, int), np.empty(0, int), ()), cascade="off"
        )
        exporter.cascade = Cascade(candidates=candidates, agreement=None, images=0)
        exporter.add(["fp32"])
        exporter.seal(NO_QUALITY, None, NO_ORIGIN)
        exporter.open_as_server()
    print(f"set up in {ready - started:.0f} s, exported in {time.perf_counter() - ready:.0f} s", file=sys.stderr)
    print(before, peak_megabytes())


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
