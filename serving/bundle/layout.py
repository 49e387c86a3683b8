"""The files of a bundle:

    manifest.json     metadata, with the SHA-256 of every other file
    rule.json         the numbers of the decision rule
    model.fp32.onnx   the graph from 8-bit pixels to the inputs of the decision; one graph per precision
    shared.bin        weights that all tasks share, if there are any
    task0.bin         the first task's own weights that are the same in every precision, and so on: learning a task adds
                      files and changes none
    task0.fp32.bin    the task's weights for one precision
    golden.npz        a few images with the outputs that they must yield in each precision

With a pre-trained trunk, two files replace the graphs and weights:

    trunk.onnx        the trunk: from 8-bit pixels to one encoded vector per image
    pooled.npz        the classifier of encoded vectors, made of statistics that are pooled over all tasks
    task0.npz         the first task's detector, which stays as it was when the task was learned, and so on

Imports no numpy, because some processes only pass bundles on.
"""

from __future__ import annotations

from collections.abc import Iterable

MANIFEST, RULE, GOLDEN = "manifest.json", "rule.json", "golden.npz"
TRUNK, POOLED = "trunk.onnx", "pooled.npz"


def graph_name(precision: str) -> str:
    return f"model.{precision}.onnx"


def part_name(owner: str, precision: str | None = None) -> str:
    """The file with the weights of `owner` ("task0" or "shared") in one precision; None: the same in all precisions."""
    return f"{owner}.bin" if precision is None else f"{owner}.{precision}.bin"


def detector_name(task: int) -> str:
    """The file with the detector of a task in a bundle with a trunk."""
    return f"task{task}.npz"


def parts_of(files: Iterable[str], precision: str) -> list[str]:
    """The weight files among `files` that the graph of this precision reads."""
    return [name for name in files if name.endswith(".bin") and name.split(".")[1:-1] in ([], [precision])]
