"""The files of a bundle:

    manifest.json     metadata, with the SHA-256 of every other file
    rule.json         the numbers of the decision rule
    model.fp32.onnx   the graph from 8-bit pixels to the inputs of the decision; one graph per precision
    shared.bin        weights that all tasks share, if there are any
    task0.bin         the first task's own weights that are the same in every precision, and so on: learning a task adds
                      files and changes none
    task0.fp32.bin    the task's weights for one precision
    golden.npz        a few images with the outputs that they must yield in each precision
    MODEL_CARD.md     what the bundle was learned from, how good it is and what its limits are, for people
    map.npz           a flat map of features with some images of each class; answers do not need it

With a pre-trained trunk, two files replace the graphs and weights:

    trunk.onnx        the trunk: from 8-bit pixels to one encoded vector per image
    trunk.int8.onnx   the same in another precision, if it was exported
    maps.onnx         the trunk with its feature maps, for explanations; its weights are those in trunk.onnx
    pooled.npz        the classifier of encoded vectors, made of statistics that are pooled over all tasks
    task0.npz         the first task's detector and, if adapters are used, its adapter, as they were when the task was
                      learned, and so on

Further files let a server learn classes. Nothing reads them to answer an image:

    statistics.npz    what each class that a run learned adds to the pooled statistics
    lesson0.npz       the encoded vectors of the examples of the first lesson that was taught since, and so on

An image is answered with two more kinds of files: one if a lesson had examples of a class that was known before, the
other if classes that were taught have been consolidated:

    extension0.npz    the detector of those examples, beside that of the task of their class
    adapter0.npz      the adapter of classes that were consolidated together

Imports no numpy, because some processes only pass bundles on.
"""

from __future__ import annotations

from collections.abc import Iterable

MANIFEST, RULE, GOLDEN = "manifest.json", "rule.json", "golden.npz"
TRUNK, POOLED, STATISTICS = "trunk.onnx", "pooled.npz", "statistics.npz"
MAPS = "maps.onnx"
EMBEDDING = "map.npz"
CARD = "MODEL_CARD.md"


def graph_name(precision: str) -> str:
    return f"model.{precision}.onnx"


def part_name(owner: str, precision: str | None = None) -> str:
    """The file with the weights of `owner` ("task0" or "shared") in one precision; None: the same in all precisions."""
    return f"{owner}.bin" if precision is None else f"{owner}.{precision}.bin"


def trunk_name(precision: str) -> str:
    """The graph of a trunk in one precision."""
    return TRUNK if precision == "fp32" else f"trunk.{precision}.onnx"


def detector_name(task: int) -> str:
    """The file with the detector of a task in a bundle with a trunk."""
    return f"task{task}.npz"


def lesson_name(lesson: int) -> str:
    """The file with the examples of a lesson."""
    return f"lesson{lesson}.npz"


def extension_name(lesson: int) -> str:
    """The file with the detectors of classes that a lesson extended."""
    return f"extension{lesson}.npz"


def adapter_name(number: int) -> str:
    """The file with the adapter of taught classes that were consolidated together."""
    return f"adapter{number}.npz"


def parts_of(files: Iterable[str], precision: str) -> list[str]:
    """The weight files among `files` that the graph of this precision reads."""
    return [name for name in files if name.endswith(".bin") and name.split(".")[1:-1] in ([], [precision])]
