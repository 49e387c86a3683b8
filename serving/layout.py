"""What lies in a bundle:

    manifest.json     what is inside, with the sha256 of every other file
    rule.json         the decision rule's numbers
    model.fp32.onnx   8-bit pixels in, what a decision reads out; one such graph for each precision
    shared.bin        weights that all tasks share, if there are any
    task0.bin         the first task's own weights that are the same in every precision, and so on: learning a task adds
                      files and changes none
    task0.fp32.bin    those that a precision has for itself
    golden.npz        a few images with the outputs that they must give in each precision

Without numpy, for those who only pass bundles on.
"""

from __future__ import annotations

from collections.abc import Iterable

MANIFEST, RULE, GOLDEN = "manifest.json", "rule.json", "golden.npz"


def graph_name(precision: str) -> str:
    return f"model.{precision}.onnx"


def part_name(owner: str, precision: str | None = None) -> str:
    """The file of weights that belong to `owner`, "task0" or "shared": in one precision, or the same in all of them."""
    return f"{owner}.bin" if precision is None else f"{owner}.{precision}.bin"


def parts_of(files: Iterable[str], precision: str) -> list[str]:
    """Those files of weights that the graph of a precision reads."""
    return [name for name in files if name.endswith(".bin") and name.split(".")[1:-1] in ([], [precision])]


class BundleError(Exception):
    """A bundle that must not be served; the message says which one and why."""
