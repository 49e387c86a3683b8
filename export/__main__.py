"""Turn a run into a bundle: `python -m export RUN --out BUNDLE`, or --publish SHELF for servers to take it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from export.bake import bake_task
from export.cascade import CascadeError, choose_cascade
from export.evidence import Evidence, gather
from export.graph import GraphPlan, write_graph
from export.notes import note
from export.opened import Opened, Question, is_large, open_written
from export.part import load_nodes
from export.publish import PublishError, publish
from export.verify import BATCHES, ParityError, synthetic_images, verify, verify_precision
from export.write import WriteError, check_target, fresh_directory, move_into_place, write_files
from export.writer import OPSET, PRODUCER, installed
from models.scores import DECISIONS
from serving.bundle import (
    PRECISIONS,
    Bundle,
    Calibration,
    FileInfo,
    Golden,
    Manifest,
    TaskInfo,
    describe_file,
    load_bundle,
    seal,
)
from serving.decision import OUTPUT_NAMES, Outputs
from serving.layout import MANIFEST, BundleError, part_name
from serving.runtime import Model
from serving.shelf import Shelf, ShelfError
from training.checkpoint import RunError
from training.decisions import AUTO
from training.device import prepare
from training.evaluate import Run, open_run

GOLDEN_IMAGES = 8
VERIFIED_IMAGES = 21
PACKAGES = (PRODUCER, "torch", "onnx", "onnxruntime-gpu", "numpy")
CASCADES = ("auto", "on", "off")


class Exporter:
    """Writes one bundle into a folder of its own: graphs, golden answers, rule and manifest."""

    def __init__(self, run: Run, folder: Path, evidence: Evidence, *, cascade: str) -> None:
        self.run = run
        self.folder = folder
        self.evidence = evidence
        self.cascade = choose_cascade(run.network, run.decider, evidence, cascade)
        self.name = f"{run.config.preset.name}-{run.config.system}"
        # Images of nobody's, and what the graphs say of them: the server's self-test.
        self.golden = Golden(synthetic_images(run.config.preset.image, GOLDEN_IMAGES), {})
        self.verification: dict[str, dict[str, float]] = {}

    def add(self, precisions: Sequence[str]) -> None:
        """Write a graph in each precision, fp32 first, verify it, and let it give the golden answers."""
        exact = self._add_exact(compared=len(precisions) > 1)
        for precision in precisions[1:]:
            golden, got = self.write(precision).ask([Question(self.golden.pixels), Question(self.evidence.pixels)])
            self.keep(precision, golden)
            self.verification[precision] = verify_precision(precision, exact, got, self.run.rule, self.evidence)

    def _add_exact(self, *, compared: bool) -> Outputs:
        """The fp32 graph, compared with the network; what it says of the evidence, if others are to be compared."""
        run = self.run
        pixels = synthetic_images(run.config.preset.image, VERIFIED_IMAGES)
        questions = [Question(pixels, size) for size in BATCHES]
        if self.cascade.candidates is not None:
            questions.append(Question(pixels, everyone=True))
        if compared:
            questions.append(Question(self.evidence.pixels))
        answers = self.write("fp32").ask(questions)
        verified = dict(zip(BATCHES, answers, strict=False))
        everyone = next((said for question, said in zip(questions, answers, strict=True) if question.everyone), None)
        self.verification["fp32"] = verify(run.network, run.decider, pixels, verified, self.cascade, everyone)
        # The first of the images that were verified are the golden ones.
        self.keep("fp32", {name: values[:GOLDEN_IMAGES] for name, values in verified[max(BATCHES)].items()})
        return answers[-1] if compared else {}

    def keep(self, precision: str, answers: Outputs) -> None:
        """Let these be the golden answers of a precision."""
        for name in OUTPUT_NAMES:
            if not np.isfinite(answers[name]).all():
                raise ParityError(f"{precision}: {name} of the golden images are not all finite: no server would start")
        self.golden.outputs[precision] = {name: answers[name] for name in OUTPUT_NAMES}

    def write(self, precision: str) -> Opened:
        """Write a graph in a precision, and open it."""
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
        write_graph(self.folder, partial(bake_task, run.network, run.decider.scorers), plan)
        return open_written(self.folder, precision)

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
            versions={**{package: installed(package) for package in PACKAGES}, "opset": str(OPSET)},
            verification=self.verification,
        )
        if before and manifest.version == before.manifest.version:
            # The same bundle again: it goes on from what it went on from, not from itself.
            manifest = before.manifest
            files[MANIFEST] = (before.path / MANIFEST).read_bytes()
        write_files(self.folder, files)
        return manifest

    def open_as_server(self) -> None:
        """Let the server's own code take what was written; a large graph would need more memory than all the rest."""
        for precision in self.golden.outputs:
            if not is_large(load_nodes(self.folder, precision)):
                Model.load(self.folder, provider="cpu", precision=precision).self_test()

    def _tasks(self, graphs: dict[str, FileInfo], before: Bundle | None) -> tuple[TaskInfo, ...]:
        run, earlier = self.run, before.manifest.files if before else {}
        tasks = []
        for task, (labels, columns) in enumerate(zip(run.config.tasks, run.rule.columns, strict=True)):
            scorer = run.decider.scorers[task]
            parts = tuple(part_name(f"task{task}", precision) for precision in (None, *self.golden.outputs))
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
    precisions: Sequence[str] | None = None,
    cascade: str = "auto",
    data: str | None = None,
    decision: str = AUTO,
    shelf: Shelf | None = None,
) -> tuple[Path, Manifest]:
    """Bake, write, verify; the new bundle and its manifest. With a shelf, `out` is where the new version appears."""
    run, metrics = _open(folder, decision), _metrics(folder)
    before = _before_on(shelf) if shelf else _before(out)
    evidence = gather(run, data)
    if precisions is None:
        # Servers may insist on what the shelf has given them so far.
        precisions = before.manifest.precisions if shelf and before else ()
    coarse = [precision for precision in precisions if precision != "fp32"]
    if coarse and not len(evidence):
        raise WriteError(
            f"{', '.join(coarse)}: no validation image is at hand to verify it by; --data says where they are"
        )
    if shelf is None:
        check_target(out)
    with fresh_directory(out if shelf else out.parent, out.name) as fresh:
        exporter = Exporter(run, fresh, evidence, cascade=cascade)
        exporter.add(list(dict.fromkeys(("fp32", *precisions))))
        manifest = exporter.seal(metrics, before)
        exporter.open_as_server()
        for reason in evidence.missing:
            note(f"no validation images of {reason}")
        if evidence.left_out:
            found = len(evidence) + evidence.left_out
            note(f"{len(evidence)} of {found} validation images were judged by, evenly by task")
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


def _open(folder: Path, decision: str) -> Run:
    try:
        return open_run(folder, torch.device("cpu"), decision)
    except ValueError as error:
        # A decision or a setting that this run cannot have.
        raise RunError(f"{folder}: {error}") from error


def _metrics(folder: Path) -> dict[str, Any]:
    path = folder / "metrics.json"
    try:
        return dict(json.loads(path.read_bytes()))
    except OSError as error:
        raise RunError(
            f"{folder}: no metrics.json ({error.strerror}); "
            f"finish it with `python -m training.fit --out {folder} --resume`"
        ) from None
    except (ValueError, TypeError) as error:
        raise RunError(f"{path}: not a JSON object: {error}") from None


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m export", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory made by training.fit")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", type=Path, metavar="BUNDLE", help="the bundle directory to write")
    where.add_argument("--publish", type=Path, metavar="SHELF", help="the folder of bundles that servers watch")
    parser.add_argument(
        "--precision",
        nargs="+",
        choices=PRECISIONS,
        help="which graphs to write (always fp32); default: those of the bundle that SHELF serves now",
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
    except (RunError, BundleError, CascadeError, ParityError, WriteError, PublishError, ShelfError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error.filename or chosen.publish or chosen.out}: {error.strerror or error}", file=sys.stderr)
        return 2
    checked = manifest.verification["fp32"]
    worst = max(value for name, value in checked.items() if "difference" in name and "absolute" not in name)
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
