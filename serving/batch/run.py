"""A batch from its options to its output file."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from serving.batch import cluster, sources, workers
from serving.batch.errors import BatchError
from serving.batch.output import check_format, join
from serving.batch.plan import CHUNK, BatchOptions, BatchPlan, WorkFolder, batch_size
from serving.batch.progress import BatchProgress
from serving.batch.sources import absolute, check_columns, chunk_count, chunks, find
from serving.bundle.model import BundleModel
from serving.bundle.providers import CUDA
from serving.bundle.terminal import escaped
from serving.host.cpus import available_cpus
from serving.inference.answers import PredictionOptions
from serving.settings import Settings


@dataclass(frozen=True)
class BatchRequest:
    """What the command line asks for."""

    bundle: Path
    source: str
    out: Path
    column: str = "image"
    keep: tuple[str, ...] = ()
    task: int | None = None
    alpha: float | None = None
    top: int | None = None
    workers: int | None = None
    ray: bool = False
    overwrite: bool = False
    chunk: int = CHUNK


def run_batch(request: BatchRequest, settings: Settings) -> int:
    """Answer all images into the output file; returns how many of them have an error.

    Raises a BatchError, BundleError, ProviderError or RequestError if it cannot be done.
    """
    check_format(request.out, lists=bool(request.top))
    work = WorkFolder(request.out)
    if request.out.exists() and not work.path.exists() and not request.overwrite:
        raise BatchError(f"{request.out} exists; allowed: a new file, or --overwrite")
    with work.alone():
        if request.overwrite:
            work.clear()
        elif work.complete:
            _say(f"{request.out} is complete already")
            return 0
        plan = make_batch_plan(request, settings, work)
        done, answered, errors = _answered(work, plan)
        if done:
            _say(f"continues: {answered:,} of {plan.images:,} images are answered already")
        progress = BatchProgress(plan.images, answered)
        progress.errors = errors
        _answer_rest(request, plan, work, done, progress)
        join(request.out, _tables(work, plan), _about(plan))
        _say(f"{request.out}: {progress.finish()}")
        work.finish()
        return progress.errors


def make_batch_plan(request: BatchRequest, settings: Settings, work: WorkFolder) -> BatchPlan:
    """The plan of the run that is continued, or a new one."""
    before = work.plan() if work.begun else None
    model = BundleModel.load(
        request.bundle,
        provider=before.provider if before else settings.provider,
        precision=before.precision if before else settings.precision,
    )
    model.self_test()
    checked = PredictionOptions.for_model(model, task=request.task, alpha=request.alpha, top=request.top)
    options = BatchOptions(
        source=absolute(request.source),
        version=model.manifest.version,
        column=request.column,
        keep=request.keep,
        task=checked.task,
        alpha=checked.alpha,
        top=checked.top if request.top else 0,
    )
    if before is not None:
        _check_same(before.options, options, work)
        return before.model_copy(update={"bundle": absolute(str(request.bundle))})
    work.clear()
    kind, items = find(options.source)
    if kind == "rows":
        check_columns(options.source, options.column, options.keep)
    elif options.keep:
        raise BatchError(f"{options.source}: a folder of images has no columns: got --keep; allowed: without it")
    count = work.begin(items)
    images = count if kind == "files" else sum(sum(groups) for _, groups in work.items())
    if not images:
        raise BatchError(f"{options.source}: no images: got 0; allowed: {', '.join(sources.SUFFIXES)} files, or rows")
    plan = BatchPlan(
        options=options,
        kind=kind,
        bundle=absolute(str(request.bundle)),
        provider="cuda" if model.provider == CUDA else "cpu",
        precision=model.precision,
        batch=settings.batch or batch_size(model.manifest.image.shape),
        chunk=request.chunk,
        images=images,
    )
    work.store_plan(plan)
    return plan


def _check_same(before: BatchOptions, now: BatchOptions, work: WorkFolder) -> None:
    old, new = before.model_dump(), now.model_dump()
    differing = [f"{name} {old[name]!r}, now {new[name]!r}" for name in old if old[name] != new[name]]
    if differing:
        raise BatchError(
            f"{work.path}: an unfinished run with other options: {'; '.join(differing)}; "
            "allowed: the same options, another output file, or --overwrite"
        )


def _answered(work: WorkFolder, plan: BatchPlan) -> tuple[set[int], int, int]:
    """The chunks whose answers are stored and intact, their images, and the errors among them."""
    done, images, errors = set(), 0, 0
    for chunk in chunks(plan, work.items()):
        if (table := work.answers(chunk.number)) is not None and len(table) == chunk.rows:
            done.add(chunk.number)
            images += chunk.rows
            errors += chunk.rows - table.column("error_code").null_count
    return done, images, errors


def _answer_rest(
    request: BatchRequest, plan: BatchPlan, work: WorkFolder, done: set[int], progress: BatchProgress
) -> None:
    missing = (chunk for chunk in chunks(plan, work.items()) if chunk.number not in done)
    left = chunk_count(plan, work.items()) - len(done)
    if not left:
        return
    gpu = plan.provider == "cuda"
    outcomes: Iterator[workers.Done]
    if request.ray:
        outcomes = cluster.answer_chunks(plan, request.out, missing, workers=request.workers, gpus=gpu)
    else:
        wanted = min(left, request.workers or (1 if gpu else available_cpus()))
        threads = max(1, available_cpus() // wanted)
        outcomes = workers.answer_chunks(plan, request.out, missing, workers=wanted, threads=threads)
    begun = False
    for outcome in outcomes:
        if not begun:
            progress.start()
            begun = True
        progress.add(outcome.images, outcome.errors)


def _tables(work: WorkFolder, plan: BatchPlan) -> Iterator[pa.Table]:
    for number in range(chunk_count(plan, work.items())):
        table = work.answers(number)
        if table is None:
            raise BatchError(f"{work.path}: answers were damaged or removed meanwhile; the same command continues")
        yield table


def _about(plan: BatchPlan) -> dict[str, str]:
    """What holds for every row, as metadata of the output file."""
    options = plan.options
    return {
        "version": options.version,
        "alpha": repr(options.alpha),
        "task": str(options.task),
        "precision": plan.precision,
        "source": options.source,
    }


def _say(line: str) -> None:
    print(escaped(line), file=sys.stderr)
