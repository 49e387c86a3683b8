"""What a bundle is made of, task by task: `python -m export.inspect BUNDLE`."""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import shape_inference
from onnx.utils import Extractor
from rich.console import Console
from rich.table import Table

from export.verify import open_session
from serving.bundle import INPUT_NAME, Bundle, BundleError, load_bundle

WARM_UP, RUNS = 3, 15


@dataclass(frozen=True)
class Part:
    """One task's share of the graph."""

    labels: tuple[str, ...]
    units: tuple[int, ...]
    macs: int
    stored_bytes: int
    milliseconds: float


def inspect(bundle: Bundle) -> list[Part]:
    """Measure every task's part of a bundle's graph; a latency is the median for one image on this machine's CPU."""
    model = shape_inference.infer_shapes(onnx.load_from_string(bundle.graph), data_prop=True)
    _settle_batch(model)
    model = shape_inference.infer_shapes(model, data_prop=True)
    return [_part(bundle, model, task) for task in range(len(bundle.manifest.tasks))]


def _part(bundle: Bundle, model: onnx.ModelProto, task: int) -> Part:
    own = f"task{task}/"
    extractor = Extractor(model)
    alone = extractor.extract_model([INPUT_NAME], [f"{own}head/ensemble/ReduceMean", f"{own}distance/mean/ReduceMean"])
    return Part(
        labels=bundle.manifest.tasks[task].labels,
        units=tuple(rows for rows, _ in _layers(model, own)),
        macs=sum(macs for _, macs in _layers(model, own)),
        stored_bytes=sum(len(c.raw_data) for c in model.graph.initializer if c.name.startswith(own)),
        milliseconds=_latency(alone, bundle),
    )


def _settle_batch(model: onnx.ModelProto) -> None:
    """One image, so that every shape in the graph is a number."""
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1
    del model.graph.value_info[:]


def _layers(model: onnx.ModelProto, own: str) -> Iterator[tuple[int, int]]:
    """Units and multiplications of a task's convolutions and linear layers, all four rotations together."""
    shapes = {
        value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in model.graph.value_info
    }
    shapes |= {constant.name: list(constant.dims) for constant in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type in ("Conv", "Gemm") and node.name.startswith(f"{own}body/"):
            weight, made = shapes[node.input[1]], shapes[node.output[0]]
            positions = math.prod(made) // weight[0]
            yield weight[0], positions * math.prod(weight)


def _latency(model: onnx.ModelProto, bundle: Bundle) -> float:
    session = open_session(model.SerializeToString())
    pixels = np.ascontiguousarray(bundle.golden.pixels[:1])
    seconds = []
    for number in range(WARM_UP + RUNS):
        started = time.perf_counter()
        session.run(None, {INPUT_NAME: pixels})
        if number >= WARM_UP:
            seconds.append(time.perf_counter() - started)
    return 1000 * statistics.median(seconds)


def show(bundle: Bundle, parts: list[Part]) -> None:
    """Print a bundle's tasks and what was verified when it was written."""
    manifest, console = bundle.manifest, Console()
    size = sum(info.size for info in manifest.files.values())
    console.print(
        f"{manifest.name} version {manifest.version}, {manifest.created}, {size / 1e6:.2f} MB", highlight=False
    )
    table = Table()
    for column in ("task", "classes", "live units a layer"):
        table.add_column(column)
    for column in ("M MACs an image", "kB stored", "ms alone (CPU)"):
        table.add_column(column, justify="right")
    for number, part in enumerate(parts):
        table.add_row(
            str(number),
            ", ".join(part.labels[:6]) + (", ..." if len(part.labels) > 6 else ""),
            " ".join(map(str, part.units)),
            f"{part.macs / 1e6:.2f}",
            f"{part.stored_bytes / 1e3:.1f}",
            f"{part.milliseconds:.2f}",
        )
    console.print(table)
    checks = Table(title="verified when it was written")
    checks.add_column("what")
    checks.add_column("value", justify="right")
    for name, value in manifest.verification.items():
        checks.add_row(name.replace("_", " "), f"{value:.3g}")
    console.print(checks)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m export.inspect", description=__doc__)
    parser.add_argument("bundle", type=Path, metavar="BUNDLE")
    chosen = parser.parse_args(arguments)
    try:
        bundle = load_bundle(chosen.bundle)
    except BundleError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    show(bundle, inspect(bundle))
    return 0


if __name__ == "__main__":
    sys.exit(main())
