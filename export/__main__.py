"""Turn a run into a bundle: `python -m export RUN --out BUNDLE`, or --publish SHELF for servers to take it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import onnxruntime as ort
import torch
from numpy.typing import NDArray

from export.bake import BakedTask, bake_task
from export.cascade import choose_cascade
from export.evidence import Evidence, gather
from export.graph import GraphPlan, write_graph
from export.opened import TaskByTask, open_written, run_graph
from export.publish import PublishError, publish
from export.verify import ParityError, synthetic_images, verify, verify_precision
from export.write import WriteError, check_target, fresh_directory, move_into_place, write_files
from export.writer import OPSET
from models.scores import DECISIONS
from serving.bundle import (
    MANIFEST,
    PRECISIONS,
    Bundle,
    BundleError,
    Calibration,
    FileInfo,
    Golden,
    Manifest,
    TaskInfo,
    describe_file,
    load_bundle,
    part_name,
    seal,
)
from serving.decision import OUTPUT_NAMES
from serving.shelf import Shelf, ShelfError
from training.checkpoint import RunError
from training.decisions import AUTO
from training.device import prepare
from training.evaluate import Run, open_run

GOLDEN_IMAGES = 8
VERIFIED_IMAGES = 21
PACKAGES = ("openworld", "torch", "onnx", "onnxruntime-gpu", "numpy")
CASCADES = ("auto", "on", "off")

Outputs = dict[str, NDArray[Any]]


class Exporter:
    """Writes one bundle into a folder of its own: graphs, golden answers, rule and manifest."""

    def __init__(self, run: Run, folder: Path, evidence: Evidence, *, cascade: str) -> None:
        self.run = run
        self.folder = folder
        self.evidence = evidence
        self.cascade = choose_cascade(run.network, run.decider, evidence.pixels, cascade)
        self.name = f"{run.config.preset.name}-{run.config.system}"
        # Images of nobody's, and what the graphs say of them: the server's self-test.
        self.golden = Golden(synthetic_images(run.config.preset.image, GOLDEN_IMAGES), {})
        self.verification: dict[str, dict[str, float]] = {}
        self._exact: Outputs = {}

    def add(self, precision: str) -> None:
        """Write a graph in a precision, verify it, and let it give the golden answers."""
        run = self.run
        session = self.write(precision)
        if precision == "fp32":
            pixels = synthetic_images(run.config.preset.image, VERIFIED_IMAGES)
            self.verification[precision] = verify(run.network, run.decider, session, pixels, self.cascade)
            self._exact = run_graph(session, self.evidence.pixels) if len(self.evidence) else {}
        else:
            got = run_graph(session, self.evidence.pixels)
            self.verification[precision] = verify_precision(precision, self._exact, got, run.rule, self.evidence)

    def write(self, precision: str) -> ort.InferenceSession | TaskByTask:
        """Write a graph in a precision and let it give the golden answers; a session of it."""
        run, preset = self.run, self.run.config.preset
        plan = GraphPlan(
            image=preset.image,
            mean=preset.network.mean,
            std=preset.network.std,
            rule=run.rule,
            precision=precision,
            candidates=self.cascade.candidates,
            margin=self.cascade.margin,
            metadata={"name": self.name, "precision": precision, "tasks": json.dumps(run.config.tasks)},
            rotations=preset.network.rotations,
        )
        weights = 0

        def bake(task: int) -> BakedTask:
            nonlocal weights
            baked = bake_task(run.network, run.decider.scorers, task)
            weights += sum(values.numel() for values in baked.body.parameters())
            return baked

        write_graph(self.folder, bake, plan)
        cascaded = plan.candidates is not None
        session = open_written(self.folder, precision, run.rule, weights=weights, cascaded=cascaded)
        outputs = run_graph(session, self.golden.pixels)
        self.golden.outputs[precision] = {name: outputs[name] for name in OUTPUT_NAMES}
        return session

    def seal(self, metrics: dict[str, Any], before: Bundle | None) -> Manifest:
        """Write what is left: rule, golden answers and manifest."""
        run = self.run
        graphs = {path.name: describe_file(path) for path in sorted(self.folder.iterdir())}
        manifest, files = seal(
            run.rule,
            self.golden,
            graphs,
            name=self.name,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            method=run.config.method,
            preset=run.config.preset.name,
            seed=run.config.seed,
            image=run.config.preset.image,
            tasks=self._tasks(graphs, before),
            before=before and before.manifest.version,
            cascade=self.cascade,
            metrics=metrics,
            versions={**{package: _version(package) for package in PACKAGES}, "opset": str(OPSET)},
            verification=self.verification,
        )
        if before and manifest.version == before.manifest.version:
            # The same bundle again: it goes on from what it went on from, not from itself.
            manifest = before.manifest
            files[MANIFEST] = (before.path / MANIFEST).read_bytes()
        write_files(self.folder, files)
        return manifest

    def _tasks(self, graphs: dict[str, FileInfo], before: Bundle | None) -> tuple[TaskInfo, ...]:
        run, earlier = self.run, before.manifest.files if before else {}
        tasks = []
        for task, (labels, columns) in enumerate(zip(run.config.tasks, run.rule.columns, strict=True)):
            scorer = run.decider.scorers[task]
            parts = tuple(part_name(f"task{task}", precision) for precision in self.golden.outputs)
            tasks.append(
                TaskInfo(
                    task=task,
                    first_class_id=columns.start,
                    labels=labels,
                    calibration=Calibration(scale=scorer.scale, shift=scorer.shift),
                    parts=parts,
                    unchanged=all(earlier.get(name) == graphs[name] for name in parts),
                )
            )
        return tuple(tasks)


def export(
    folder: Path,
    out: Path,
    *,
    precisions: Sequence[str] = ("fp32",),
    cascade: str = "auto",
    data: str | None = None,
    decision: str = AUTO,
    shelf: Shelf | None = None,
) -> tuple[Path, Manifest]:
    """Bake, write, verify; the new bundle and its manifest. With a shelf, `out` is where the new version appears."""
    run = open_run(folder, torch.device("cpu"), decision)
    metrics = _metrics(folder)
    before = _before_on(shelf) if shelf else _before(out)
    evidence = gather(run.config, data)
    coarse = [precision for precision in precisions if precision != "fp32"]
    if coarse and not len(evidence):
        raise WriteError(
            f"{', '.join(coarse)}: no validation image is at hand to verify it by; --data says where they are"
        )
    if shelf is None:
        check_target(out)
    with fresh_directory(out if shelf else out.parent, out.name) as fresh:
        exporter = Exporter(run, fresh, evidence, cascade=cascade)
        for precision in dict.fromkeys(("fp32", *precisions)):
            exporter.add(precision)
        manifest = exporter.seal(metrics, before)
        if shelf is None:
            move_into_place(fresh, out)
            return out, manifest
        return publish(fresh, shelf, before, evidence), manifest


def _before(folder: Path) -> Bundle | None:
    """The bundle that the new one replaces, if there is one that can be read."""
    try:
        return load_bundle(folder)
    except BundleError:
        return None


def _before_on(shelf: Shelf) -> Bundle | None:
    """The bundle that is served now; one that cannot be read is no reason to forget what it knew."""
    current = shelf.current()
    try:
        return load_bundle(current) if current else None
    except BundleError as error:
        raise PublishError(
            f"{error}; what is current cannot be compared with: roll back, or remove the link `current`"
        ) from None


def _metrics(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / "metrics.json").read_bytes()))
    except OSError as error:
        raise RunError(
            f"{folder}: no metrics.json ({error.strerror}); "
            f"finish it with `python -m training.fit --out {folder} --resume`"
        ) from None


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed as a package"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m export", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory made by training.fit")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", type=Path, metavar="BUNDLE", help="the bundle directory to write")
    where.add_argument("--publish", type=Path, metavar="SHELF", help="the folder of bundles that servers watch")
    parser.add_argument(
        "--precision", nargs="+", choices=PRECISIONS, default=["fp32"], help="which graphs to write (always fp32)"
    )
    parser.add_argument("--cascade", choices=CASCADES, default="auto", help="default: on if shown to change nothing")
    parser.add_argument("--decision", choices=(AUTO, *DECISIONS), default=AUTO, help="default: what the run chose")
    parser.add_argument(
        "--data", metavar="FOLDER", help="where the images are now, if not where they were learned from"
    )
    return parser


def main(arguments: list[str] | None = None) -> int:
    chosen = make_parser().parse_args(arguments)
    prepare(torch.device("cpu"))
    shelf = Shelf(chosen.publish) if chosen.publish else None
    try:
        out, manifest = export(
            chosen.run,
            chosen.publish or chosen.out,
            precisions=chosen.precision,
            cascade=chosen.cascade,
            data=chosen.data,
            decision=chosen.decision,
            shelf=shelf,
        )
    except (RunError, BundleError, ParityError, WriteError, PublishError, ShelfError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    worst = max(value for name, value in manifest.verification["fp32"].items() if "difference" in name)
    size = sum(info.size for info in manifest.files.values())
    turned = manifest.cascade.candidates
    print(
        f"{out}: {manifest.name} version {manifest.version}, {len(manifest.tasks)} tasks "
        f"({sum(task.unchanged for task in manifest.tasks)} unchanged), {len(manifest.labels)} classes, "
        f"{', '.join(manifest.precisions)}, {size / 1e6:.2f} MB, decision {manifest.decision}, "
        f"{'all' if turned is None else f'at most {turned}'} tasks see all rotations that were taught, "
        f"graph equals network within {worst:.1g}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
