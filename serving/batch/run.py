"""A batch from its options to its output file."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from serving.batch import cluster, sources, workers
from serving.batch.entries import absolute
from serving.batch.errors import BatchError
from serving.batch.output import check_format, join
from serving.batch.parquet import KeptColumns, check_columns, row_groups
from serving.batch.plan import CHUNK, BatchOptions, BatchPlan, CompleteRun, SourceKind, WorkFolder, batch_size
from serving.batch.progress import BatchProgress
from serving.batch.sources import chunk_count, chunks, find, first_file
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
        raise _exists(request)
    with work.alone():
        if request.overwrite:
            work.clear()
        plan = make_batch_plan(request, settings, work)
        if isinstance(plan, CompleteRun):
            work.finish(plan)
            _say(f"{request.out} is complete already")
            return plan.errors
        if plan.warning:
            _say(f"warning: {plan.warning}")
        done, answered, errors = _answered(work, plan)
        if answered:
            _say(f"continues: {answered:,} of {plan.images:,} images are answered already")
        progress = BatchProgress(plan.images, answered)
        progress.errors = errors
        _answer_rest(request, plan, work, done, progress)
        join(request.out, _tables(work, plan), _about(plan))
        _say(f"{request.out}: {progress.finish()}")
        work.finish(CompleteRun(options=plan.options, errors=progress.errors))
        return progress.errors


def make_batch_plan(request: BatchRequest, settings: Settings, work: WorkFolder) -> BatchPlan | CompleteRun:
    """The plan of the run that is continued, or a new one; or the run that was complete when it was killed."""
    complete = work.completed() if request.out.exists() else None
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
    if complete is not None:
        if complete.options != options:
            raise _exists(request)
        return complete
    if before is not None:
        _check_same(before.options, options, work)
        warning = model.manifest.verdict.warning
        return before.model_copy(update={"bundle": absolute(str(request.bundle)), "warning": warning})
    work.clear()
    return _new_plan(request, settings, work, model, options)


def _new_plan(
    request: BatchRequest, settings: Settings, work: WorkFolder, model: BundleModel, options: BatchOptions
) -> BatchPlan:
    """Lists the images, and decides what must stay the same until they are all answered."""
    kind, images, kept = _listed(work, options)
    gpu = model.provider == CUDA
    workers = min(-(-images // request.chunk), _workers(request, gpu=gpu))
    plan = BatchPlan(
        options=options,
        kind=kind,
        bundle=absolute(str(request.bundle)),
        provider="cuda" if gpu else "cpu",
        precision=model.precision,
        batch=settings.batch or batch_size(model.manifest.image.shape),
        chunk=request.chunk,
        images=images,
        threads=1 if request.ray else max(1, available_cpus() // workers),
        kept=kept.encode(),
        warning=model.manifest.verdict.warning,
    )
    work.store_plan(plan)
    return plan


def _listed(work: WorkFolder, options: BatchOptions) -> tuple[SourceKind, int, KeptColumns]:
    """Stores the list of what is to be answered; returns how many images it has, and the columns to copy."""
    kind, names = find(options.source)
    kept = KeptColumns()
    if kind == "files":
        if options.keep:
            raise BatchError(f"{options.source}: a folder of images has no columns: got --keep; allowed: without it")
        images = work.begin(names)
    else:
        check_columns(first_file(options.source), options.column, options.keep)
        work.begin(row_groups(names, options.keep, kept))
        images = sum(sum(groups) for _, groups in work.items())
    if not images:
        raise BatchError(f"{options.source}: no images: got 0; allowed: {', '.join(sources.SUFFIXES)} files, or rows")
    return kind, images, kept


def _workers(request: BatchRequest, *, gpu: bool) -> int:
    return request.workers or (1 if gpu else available_cpus())


def _exists(request: BatchRequest) -> BatchError:
    return BatchError(f"{request.out} exists; allowed: a new file, or --overwrite")


def _check_same(before: BatchOptions, now: BatchOptions, work: WorkFolder) -> None:
    old, new = before.model_dump(), now.model_dump()
    differing = [f"{name} {old[name]!r}, now {new[name]!r}" for name in old if old[name] != new[name]]
    if differing:
        raise BatchError(
            f"{work.path}: an unfinished run with other options: {'; '.join(differing)}; "
            "allowed: the same options, another output file, or --overwrite"
        )


def _answered(work: WorkFolder, plan: BatchPlan) -> tuple[bytearray, int, int]:
    """For each chunk 1 if its answers are stored and intact, else 0; their images, and the errors among them."""
    done, images, errors = bytearray(), 0, 0
    for chunk in chunks(plan, work.items()):
        table = work.answers(chunk.number)
        intact = table is not None and len(table) == chunk.rows
        done.append(intact)
        if table is not None and intact:
            images += chunk.rows
            errors += chunk.rows - table.column("error_code").null_count
    return done, images, errors


def _answer_rest(
    request: BatchRequest, plan: BatchPlan, work: WorkFolder, done: bytearray, progress: BatchProgress
) -> None:
    missing = (chunk for chunk in chunks(plan, work.items()) if not done[chunk.number])
    left = done.count(0)
    if not left:
        return
    gpu = plan.provider == "cuda"
    outcomes: Iterator[workers.Done]
    if request.ray:
        outcomes = cluster.answer_chunks(plan, request.out, missing, workers=request.workers, gpus=gpu)
    else:
        outcomes = workers.answer_chunks(plan, request.out, missing, workers=min(left, _workers(request, gpu=gpu)))
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
        **({"warning": plan.warning} if plan.warning else {}),
    }


def _say(line: str) -> None:
    print(escaped(line), file=sys.stderr)
