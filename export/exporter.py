"""From a run to a bundle: bake, write the graph in every precision, verify, and move it into place."""

import io
import json
import math
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from export.checks.parity import BATCHES, ParityError, synthetic_images, verify, verify_precision
from export.checks.photo_evidence import gather_photos
from export.checks.quality import Quality, VerdictError, quality_of
from export.checks.remembering import Allowed, PublishError, put_on_shelf
from export.checks.trunk_parity import verify_trunk, write_trunk
from export.checks.trunk_precision import write_coarse_trunk
from export.graph.assemble import GraphPlan, write_graph
from export.graph.baked_task import bake_task
from export.graph.cascade import CascadeError, choose_cascade
from export.graph.evidence import Evidence, gather
from export.graph.notes import note
from export.graph.session import GraphQuery, GraphRunner, is_large, load_nodes, open_written
from export.graph.writer import OPSET, PRODUCER, installed
from models.suggest import unknown_name
from models.trunks.trunk import Trunk, TrunkError, reopen
from serving.bundle.decision import FEATURES, OUTPUT_NAMES, Outputs
from serving.bundle.directory import WriteError, check_target, fresh_directory, move_into_place
from serving.bundle.embedding import Embedding, some_of_each
from serving.bundle.errors import BundleError
from serving.bundle.layout import EMBEDDING, MANIFEST, detector_name, part_name, trunk_name
from serving.bundle.manifest import Bundle, Golden, Manifest, describe_file, load_bundle, seal
from serving.bundle.model import BundleModel
from serving.bundle.old_classes import MAX_LOSS
from serving.bundle.precisions import PRECISIONS, TRUNK_PRECISIONS
from serving.bundle.sections import Calibration, Cascade, FileInfo, Origin, TaskInfo, TrunkInfo
from serving.bundle.shelf import Shelf, ShelfError
from training.data.quarantined import Address
from training.learn.decisions import AUTO
from training.run import Run, RunError, open_run
from training.store.history import History, without_places

GOLDEN_IMAGES, GOLDEN_PHOTOS = 8, 3
VERIFIED_IMAGES = 21
EXPORT_ERRORS = (BundleError, CascadeError, ParityError, PublishError, ShelfError, TrunkError, VerdictError, WriteError)
"""What a command prints as a one-line error, besides a RunError."""
PACKAGES = (PRODUCER, "torch", "onnx", "onnxruntime", "numpy")


class Exporter:
    """Writes one bundle into a folder: graphs, golden answers, rule and manifest."""

    def __init__(self, run: Run, folder: Path, evidence: Evidence, *, cascade: str) -> None:
        self.run = run
        self.folder = folder
        self.evidence = evidence
        self.cascade = self.choose_cascade(cascade)
        self.name = f"{run.config.preset.name}-{run.config.system}"
        # Synthetic images and the answers of the graphs to them: the self-test of the server.
        self.golden = Golden(synthetic_images(run.config.preset.image, GOLDEN_IMAGES), {})
        self.verification: dict[str, dict[str, float]] = {}

    def choose_cascade(self, wish: str) -> Cascade:
        return choose_cascade(*self.run.need_decider("a cascade"), self.evidence, wish)

    def add(self, precisions: Sequence[str]) -> None:
        """Write a graph in each precision, fp32 first, verify it, and record its golden answers."""
        exact = self._add_exact(compared=len(precisions) > 1)
        for precision in precisions[1:]:
            golden, got = self.write(precision).run([GraphQuery(self.golden.pixels), GraphQuery(self.evidence.pixels)])
            self.keep(precision, golden)
            self.verification[precision] = verify_precision(precision, exact, got, self.run.rule, self.evidence)

    def _add_exact(self, *, compared: bool) -> Outputs:
        """Write and verify the fp32 graph; its outputs on the evidence, if others are compared with them."""
        run = self.run
        pixels = synthetic_images(run.config.preset.image, VERIFIED_IMAGES)
        questions = [GraphQuery(pixels, size) for size in BATCHES]
        if self.cascade.candidates is not None:
            questions.append(GraphQuery(pixels, all_rotated=True))
        if compared:
            questions.append(GraphQuery(self.evidence.pixels))
        answers = self.write("fp32").run(questions)
        verified = dict(zip(BATCHES, answers, strict=False))
        everyone = next((got for question, got in zip(questions, answers, strict=True) if question.all_rotated), None)
        network, decider = run.need_decider("a graph")
        self.verification["fp32"] = verify(network, decider, pixels, verified, self.cascade, everyone)
        # The first of the images that were verified are the golden ones.
        self.keep("fp32", {name: values[:GOLDEN_IMAGES] for name, values in verified[max(BATCHES)].items()})
        return answers[-1] if compared else {}

    def keep(self, precision: str, answers: Outputs) -> None:
        for name in OUTPUT_NAMES:
            if not np.isfinite(answers[name]).all():
                raise ParityError(f"{precision}: {name} of the golden images are not finite, so no server would start")
        self.golden.outputs[precision] = {name: answers[name].astype(np.float32) for name in OUTPUT_NAMES}

    def write(self, precision: str) -> GraphRunner:
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
        network, decider = run.need_decider("a graph")
        write_graph(self.folder, partial(bake_task, network, decider.scorers), plan)
        return open_written(self.folder, precision)

    def add_map(self) -> None:
        """Write the map of features, if there are images to make it of."""
        chosen = some_of_each(self.evidence.class_ids)
        if len(chosen) < 3 or (features := self.features(chosen)) is None:
            return
        stored = io.BytesIO()
        arrays: dict[str, Any] = Embedding.fit(features, self.evidence.class_ids[chosen]).to_arrays()
        np.savez(stored, **arrays)
        (self.folder / EMBEDDING).write_bytes(stored.getvalue())

    def features(self, chosen: NDArray[np.int64]) -> NDArray[np.float32] | None:
        """What the quarantine would keep of some of the evidence; None for a graph that is too large to run for it."""
        if is_large(load_nodes(self.folder, "fp32")):
            return None
        (outputs,) = open_written(self.folder, "fp32").run([GraphQuery(self.evidence.pixels[chosen])])
        return np.asarray(outputs[FEATURES], np.float32)

    def seal(self, quality: Quality, before: Bundle | None, origin: Origin) -> Manifest:
        """Write the rule, the golden answers, the model card and the manifest."""
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
            trunk=self.trunk_info,
            tasks=self.tasks(graphs, before),
            origin=origin,
            before=before and before.manifest.version,
            cascade=self.cascade,
            verdict=quality.verdict,
            metrics=quality.metrics,
            versions={
                "python": platform.python_version(),
                **{package: installed(package) for package in PACKAGES},
                "opset": str(OPSET),
            },
            verification=self.verification,
        )
        if before and manifest.version == before.manifest.version:
            # The same bundle again: its predecessor stays, or it would be its own.
            manifest = before.manifest
            files[MANIFEST] = (before.path / MANIFEST).read_bytes()
        for name, content in files.items():
            (self.folder / name).write_bytes(content)
        return manifest

    def open_as_server(self) -> None:
        """Load the bundle with the code of the server; large graphs are left out, because they need too much memory."""
        for precision in self.golden.outputs:
            if not is_large(load_nodes(self.folder, precision)):
                BundleModel.load(self.folder, provider="cpu", precision=precision).self_test()

    @property
    def trunk_info(self) -> TrunkInfo | None:
        return None

    def tasks(self, graphs: dict[str, FileInfo], before: Bundle | None) -> tuple[TaskInfo, ...]:
        run, earlier = self.run, before.manifest.files if before else {}
        _, decider = run.need_decider("a graph")
        tasks = []
        for task, (labels, columns) in enumerate(zip(run.config.tasks, run.rule.columns, strict=True)):
            scorer = decider.scorers[task]
            parts = tuple(part_name(f"task{task}", precision) for precision in (None, *self.golden.outputs))
            tasks.append(
                TaskInfo(
                    task=task,
                    first_class_id=columns.start,
                    labels=labels,
                    calibration=Calibration(scale=scorer.scale, shift=scorer.shift),
                    own_images=run.rule.tasks[task].images,
                    parts=parts,
                    unchanged=all(earlier.get(name) == graphs[name] for name in parts),
                )
            )
        return tuple(tasks)


class TrunkExporter(Exporter):
    """Writes the bundle of a run with a trunk: its graph once, and the pooled classifier."""

    def __init__(
        self,
        run: Run,
        folder: Path,
        evidence: Evidence,
        trunk: Trunk,
        before: Bundle | None = None,
        *,
        teaching: bool = True,
    ) -> None:
        super().__init__(run, folder, evidence, cascade="off")
        self.before, self.teaching = before, teaching
        # Photos are large compared with the classifier, so only a few are stored.
        self.golden = Golden(self.golden.pixels[:GOLDEN_PHOTOS], {})
        self.trunk = trunk
        self.decider = run.need_pooled()

    def choose_cascade(self, wish: str) -> Cascade:
        return Cascade(candidates=None, agreement=None, images=0)

    def add(self, precisions: Sequence[str]) -> None:
        """Write trunk and classifier, verify them, and record their golden answers."""
        if refused := [precision for precision in precisions if precision not in TRUNK_PRECISIONS]:
            allowed = ", ".join(TRUNK_PRECISIONS)
            raise WriteError(f"precision {', '.join(refused)} is not available with a trunk; allowed: {allowed}")
        write_trunk(self.folder, self.trunk, self.decider, teaching=self.teaching)
        pixels = synthetic_images(self.run.config.preset.image, VERIFIED_IMAGES)
        answers, self.verification["fp32"] = verify_trunk(self.folder, self.run, pixels, self.evidence)
        self.keep("fp32", {name: values[:GOLDEN_PHOTOS] for name, values in answers.items()})
        for precision in precisions[1:]:
            coarse = write_coarse_trunk(self.folder, precision, self.trunk, self.evidence, self.before)
            self.keep(precision, coarse.outputs(self.decider, self.golden.pixels))
            self.verification[precision] = coarse.verify(self.decider, self.evidence)

    def features(self, chosen: NDArray[np.int64]) -> NDArray[np.float32] | None:
        encoded = self.evidence.encoded
        if encoded is None:
            return None
        # Of several rotations, the upright one.
        return encoded[chosen] if encoded.ndim == 2 else encoded[chosen, 0]

    @property
    def trunk_info(self) -> TrunkInfo:
        spec = self.trunk.spec
        return TrunkInfo(name=spec.public_name, sha256=spec.sha256, size=spec.size, depths=spec.depths)

    def open_as_server(self) -> None:
        for precision in self.golden.outputs:
            BundleModel.load(self.folder, provider="cpu", precision=precision).self_test()

    def tasks(self, graphs: dict[str, FileInfo], before: Bundle | None) -> tuple[TaskInfo, ...]:
        run, earlier = self.run, before.manifest.files if before else {}
        trunks = [trunk_name(precision) for precision in self.golden.outputs]
        return tuple(
            TaskInfo(
                task=task,
                first_class_id=run.rule.columns[task].start,
                labels=labels,
                calibration=None,
                own_images=own.images,
                parts=(detector_name(task),),
                unchanged=all(earlier.get(name) == graphs[name] for name in (*trunks, detector_name(task))),
            )
            for task, (labels, own) in enumerate(zip(run.config.tasks, run.rule.tasks, strict=True))
        )


class Exported(NamedTuple):
    """A bundle that was written, and where it is; with a shelf, its version is the one that was published."""

    path: Path
    manifest: Manifest


def export(
    folder: Path,
    out: Path,
    *,
    precisions: Sequence[str] | None = None,
    cascade: str = "auto",
    data: str | None = None,
    decision: str = AUTO,
    shelf: Shelf | None = None,
    quarantine: Address | None = None,
    force: bool = False,
    max_loss: float | None = None,
    trunk_weights: Path | None = None,
    teaching: bool = True,
) -> Exported:
    """Bake, write and verify a run. With a shelf, `out` is its folder, and the new bundle becomes its current one.

    `data` and `quarantine` are where the images of the run are now, if not where it learned from. A run that does not
    work, or on a shelf one by which an earlier class loses more than `max_loss` points of CIL or known images become
    unknown, needs `force`. A named `decision` replaces the one of the shelf.
    Without `teaching`, the bundle of a run with a trunk has nothing that a server could learn classes from.
    """
    for precision in precisions or ():
        if precision not in PRECISIONS:
            raise WriteError(unknown_name("precision", precision, PRECISIONS))
    run = _open(folder, decision)
    before = _current(shelf) if shelf else _replaced(out)
    another = bool(shelf and before and run.decider.name != before.rule.score)
    if shelf and before and another and decision == AUTO:
        another = _is_provisional(before, run)
        _tell_decision(run.decider.name, before.rule.score, chosen_now=another)
        if not another:
            decision = before.rule.score
            run = _open(folder, decision)
    trunk = None if run.config.trunk is None else reopen(run.config.trunk, weights=trunk_weights, run=folder)
    quality = quality_of(folder, run, data, quarantine, trunk)
    quality.check(folder, force=force)
    evidence = gather(run, data, quarantine) if trunk is None else gather_photos(run, trunk, data, quarantine)
    if precisions is None:
        # Servers may require the precisions that the shelf has offered so far.
        precisions = before.manifest.precisions if shelf and before else ()
    coarse = [precision for precision in precisions if precision != "fp32"]
    if coarse and not len(evidence):
        raise WriteError(
            f"{', '.join(coarse)}: no validation image is available to verify it; give their place with --data"
        )
    if shelf is None:
        check_target(out)
    forced = quality.verdict.warning is not None
    origin = _origin(run, folder, _options(coarse, cascade, decision, forced=forced, teaching=teaching))
    with fresh_directory(out if shelf else out.parent, out.name) as fresh:
        if trunk is None:
            exporter = Exporter(run, fresh, evidence, cascade=cascade)
        else:
            exporter = TrunkExporter(run, fresh, evidence, trunk, before, teaching=teaching)
        exporter.add(list(dict.fromkeys(("fp32", *precisions))))
        exporter.add_map()
        manifest = exporter.seal(quality, before, origin)
        exporter.open_as_server()
        for reason in evidence.missing:
            note(f"no {evidence.kind} images of {reason}")
        if evidence.left_out:
            found = len(evidence) + evidence.left_out
            note(f"{len(evidence)} of {found} {evidence.kind} images were used, evenly by task")
        if shelf is not None:
            loss = math.inf if force else MAX_LOSS if max_loss is None else max_loss
            allowed = Allowed(loss, unknown=force, decision=another)
            return Exported(put_on_shelf(fresh, shelf, before, evidence, allowed), manifest)
        move_into_place(fresh, out)
        return Exported(out, manifest)


def _options(
    precisions: Sequence[str], cascade: str, decision: str, *, forced: bool, teaching: bool
) -> tuple[str, ...]:
    """The options by which `openworld export RUN --out BUNDLE` writes the same bundle."""
    words = ["--precision", *dict.fromkeys(precisions)] if precisions else []
    words += ["--cascade", cascade] if cascade != AUTO else []
    words += ["--decision", decision] if decision != AUTO else []
    words += [] if teaching else ["--no-teaching"]
    return (*words, *(["--force"] if forced else []))


def _origin(run: Run, folder: Path, options: tuple[str, ...]) -> Origin:
    """What the run recorded about itself, and the options of the export. Commands that only continued the run after an
    interruption changed nothing."""
    commands = [command for command in History(folder).commands if "--resume" not in command]
    data = dict.fromkeys(lesson.dataset for lesson in run.config.lessons)
    return Origin(data=tuple(data), commands=tuple(dict.fromkeys(map(without_places, commands))), export=options)


def _replaced(folder: Path) -> Bundle | None:
    """The bundle that the new one replaces, if there is a readable one."""
    try:
        return load_bundle(folder)
    except BundleError:
        return None


def _current(shelf: Shelf) -> Bundle | None:
    """The bundle that is served now. If it cannot be read, what it knew cannot be protected, so that is refused."""
    current = shelf.current()
    try:
        return load_bundle(current) if current else None
    except BundleError as error:
        raise PublishError(
            f"{error}; the current bundle cannot be compared with: roll back, or remove the link `current`"
        ) from None


def _is_provisional(before: Bundle, run: Run) -> bool:
    """Whether the decision of a bundle was fixed when the run had one task, before alternatives could be compared."""
    return len(before.rule.tasks) == 1 < len(run.rule.tasks)


def _tell_decision(own: str, served: str, *, chosen_now: bool) -> None:
    """Print which of two decisions a run is published with: its own, or the one that is served."""
    if chosen_now:
        note(
            f"the current bundle decides by {served}, chosen with a single task; the run decides by {own} now, and is "
            f"published so (--decision {served} keeps the other one)"
        )
    else:
        # Answers for earlier tasks must stay as they are.
        note(
            f"the run would decide by {own}; it is published as served so far, by {served} (--decision {own} publishes "
            "the other one)"
        )


def _open(folder: Path, decision: str) -> Run:
    try:
        return open_run(folder, torch.device("cpu"), decision)
    except ValueError as error:
        # A decision or a setting that this run cannot have.
        raise RunError(f"{folder}: {error}") from error
