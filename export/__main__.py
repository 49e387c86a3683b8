"""Turn a run into a bundle: `python -m export RUN --out BUNDLE`."""

from __future__ import annotations

import argparse
import json
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from export.bake import bake
from export.graph import OPSET, to_onnx
from export.verify import ParityError, open_session, run_graph, synthetic_images, verify
from export.write import WriteError, check_target, write_directory
from serving.bundle import Calibration, Golden, Manifest, TaskInfo, seal
from training.checkpoint import RunError
from training.evaluate import Run, open_run

GOLDEN_IMAGES = 8
VERIFIED_IMAGES = 21
PACKAGES = ("openworld", "torch", "onnx", "onnxruntime-gpu", "numpy")


def export(folder: Path, out: Path) -> Manifest:
    """Bake, convert, verify and write; the manifest of the new bundle."""
    check_target(out)
    run = open_run(folder, torch.device("cpu"))
    metrics = _metrics(folder)
    preset = run.config.preset
    name = f"{preset.name}-{run.config.method}"
    graph = to_onnx(bake(run.network), preset.image, {"name": name, "tasks": json.dumps(run.config.tasks)})
    verification = verify(run.network, run.rule, graph, synthetic_images(preset.image, VERIFIED_IMAGES))
    # Images of nobody's, and what the graph says of them: the server's self-test.
    pixels = synthetic_images(preset.image, GOLDEN_IMAGES)
    golden = Golden(pixels, run_graph(open_session(graph), pixels))
    manifest, files = seal(
        run.rule,
        graph,
        golden,
        name=name,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        method=run.config.method,
        preset=preset.name,
        seed=run.config.seed,
        image=preset.image,
        tasks=_tasks(run),
        metrics=metrics,
        versions={**{package: _version(package) for package in PACKAGES}, "opset": str(OPSET)},
        verification=verification,
    )
    write_directory(out, files)
    return manifest


def _metrics(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / "metrics.json").read_bytes()))
    except OSError as error:
        raise RunError(
            f"{folder}: no metrics.json ({error.strerror}); "
            f"finish it with `python -m training.fit --out {folder} --resume`"
        ) from None


def _tasks(run: Run) -> tuple[TaskInfo, ...]:
    tasks = []
    for task, (labels, columns) in enumerate(zip(run.config.tasks, run.rule.columns, strict=True)):
        head = run.network.head(task)
        calibration = Calibration(scale=float(head.scale), shift=float(head.shift))
        tasks.append(TaskInfo(task=task, first_class_id=columns.start, labels=labels, calibration=calibration))
    return tuple(tasks)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed as a package"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m export", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory made by training.fit")
    parser.add_argument("--out", type=Path, required=True, metavar="BUNDLE", help="the bundle directory to write")
    chosen = parser.parse_args(arguments)
    try:
        manifest = export(chosen.run, chosen.out)
    except (RunError, ParityError, WriteError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    worst = max(value for name, value in manifest.verification.items() if "difference" in name)
    size = sum(info.size for info in manifest.files.values())
    print(
        f"{chosen.out}: {manifest.name} version {manifest.version}, {len(manifest.tasks)} tasks, "
        f"{len(manifest.labels)} classes, {size / 1e6:.2f} MB, graph equals network within {worst:.1g}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
