"""The routes under /teach; the middleware checks the admin token before."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast

from fastapi import Path, Query
from pydantic import Field
from pydantic.json_schema import SkipJsonSchema
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse

from serving import errors
from serving.bundle.labels import plain, same_label
from serving.bundle.pixels import Limits
from serving.http.context import RequestContext
from serving.http.guards import Guard, GuardedRouter
from serving.http.openapi import FILE_SCHEMA, error_responses, file_response
from serving.http.page import page_response
from serving.http.predict_routes import Predictions
from serving.http.schemas import Answer, ApiModel, Whole, field
from serving.http.upload import read_body
from serving.inference.engine import Engine
from serving.quarantine.api.routes import MAX_ITEMS, PRIVATE, translated
from serving.quarantine.api.schemas import LARGEST_ID, Changed, ChangeEntry, LabelBody
from serving.quarantine.records import LabelError, UnknownIdError
from serving.teaching.api import schemas
from serving.teaching.errors import TeachError

if TYPE_CHECKING:
    from serving.teaching.teacher import Teacher

T = TypeVar("T")

MAX_PARTS = 1_000_000
"""Archives that an export can be asked for; it has far fewer."""

_threads = ThreadPoolExecutor(4, "teach")
"""A separate thread pool: a database that hangs must not delay other routes."""

JobId = Annotated[Whole, Path(ge=0, le=LARGEST_ID, description="number of a job", examples=[7])]


class ClassesQuery(ApiModel):
    examples: Whole = field("how many examples of each class to list", 6, ge=0, le=100, default=6)


class ExamplesQuery(ApiModel):
    label: str | SkipJsonSchema[None] = field("only of this class", "cow", default=None)
    state: Literal["any", "waiting", "learned"] = field("only those that wait, or were learned", "any", default="any")
    after: Whole = field("only images with larger numbers", 17, ge=0, le=LARGEST_ID, default=0)
    limit: Whole = field("how many at most", 100, ge=1, le=MAX_ITEMS, default=100)


class UploadQuery(ApiModel):
    label: Annotated[str, Field(max_length=200)] | SkipJsonSchema[None] = field(
        "name of its class; without it the image is only stored", "cow", default=None
    )


class ChangeQuery(ApiModel):
    accept: bool = field("publish the change automatically unless the gate objects", True, default=True)


class PageQuery(ApiModel):
    after: Whole = field("only images with larger numbers", 17, ge=0, le=LARGEST_ID, default=0)
    limit: Whole = field("how many at most", 100, ge=1, le=MAX_ITEMS, default=100)


class LogQuery(ApiModel):
    limit: Whole = field("how many at most", 100, ge=1, le=1000, default=100)


class ExportQuery(ApiModel):
    format: Literal["folders", "label-studio"] = field("a folder per class, or Label Studio's JSON", "folders")
    label: str | SkipJsonSchema[None] = field("only of this class", "cow", default=None)
    part: Whole | SkipJsonSchema[None] = field(
        "one of several archives, each of which can be imported, from 1 to the number in the header x-openworld-parts; "
        "without it, everything is in one archive",
        2,
        ge=1,
        le=MAX_PARTS,
        default=None,
    )


router = GuardedRouter(
    Guard.ADMIN,
    errors.TeachOffError,
    errors.QuarantineOffError,
    errors.ParameterError,
    errors.QuarantineAwayError,
    prefix="/teach",
    tags=["Teaching"],
)
_body_errors = (errors.MalformedRequestError, errors.MediaTypeError, errors.TooManyBytesError)
_change_errors = error_responses(*_body_errors, errors.NoSuchItemError, errors.BadLabelError)
_job_errors = error_responses(*_body_errors, errors.BadLabelError, errors.TeachBusyError, errors.NothingToLearnError)
_class_errors = error_responses(
    *_body_errors, errors.NoSuchItemError, errors.BadLabelError, errors.TeachBusyError, errors.ClassExistsError
)
_publish_errors = error_responses(
    *_body_errors,
    errors.NoSuchItemError,
    errors.JobStateError,
    errors.GateError,
    errors.TeachChangedError,
    errors.SwapError,
    errors.BundleRefusedError,
    errors.DeadlineError,
)
_upload_errors = error_responses(
    *_body_errors,
    errors.TooManyPixelsError,
    errors.ImageFormatError,
    errors.EmptyImageError,
    errors.BrokenImageError,
    errors.BadLabelError,
    errors.OutputError,
    errors.BusyError,
    errors.DeadlineError,
)


@router.get("", response_class=HTMLResponse)
async def teach() -> Response:
    """The page for teaching."""
    return page_response("teach.html")


@router.get("/status", response_model=schemas.TeachStatus)
async def teach_status(request: Request) -> Response:
    """Whether this server can be taught, what waits, and the job that runs."""
    from serving.teaching.api.views import status_view

    engine, auto = _engine(request), request.app.state.settings.teach == "auto"
    served = engine.loaded.model.manifest
    return await _answer(request, lambda teacher, who: status_view(teacher, served, who, auto=auto))


@router.get("/jobs/{id}", response_model=schemas.TeachingJob, responses=error_responses(errors.NoSuchItemError))
async def teach_job(request: Request, id: JobId) -> Response:
    """A job, with its progress and its result."""
    from serving.teaching.api.views import job_view

    def show(teacher: Teacher, who: str) -> schemas.TeachingJob:
        teacher.reconcile()
        return job_view(teacher.jobs.get(id))

    return await _answer(request, show)


@router.post("/learn", response_model=schemas.TeachingJob, status_code=202, responses=_job_errors)
async def learn(request: Request, body: schemas.LearnBody) -> Response:
    """Learn what is labelled: a job that makes a candidate and compares it with the served model."""
    from serving.teaching.api.views import job_view
    from serving.teaching.lesson_job import Wanted

    return await _answer(
        request,
        lambda teacher, who: job_view(teacher.learn(who, Wanted(), accept=body.accept, force=body.force)),
        status=202,
    )


@router.post("/group", response_model=schemas.TeachingJob, status_code=202, responses=_job_errors)
async def group(request: Request) -> Response:
    """Group the unlabelled images: a job, after which /unknowns/groups has the groups."""
    from serving.teaching.api.views import job_view

    return await _answer(request, lambda teacher, who: job_view(teacher.group(who)), status=202)


@router.post("/accept", response_model=schemas.Accepted, responses=_publish_errors)
async def accept(request: Request, body: schemas.AcceptBody) -> Response:
    """Publish the candidate of a job; all workers serve it then."""
    return await _answer(
        request,
        lambda teacher, who: schemas.Accepted(**teacher.accept(body.job, who, force=body.force)._asdict()),
    )


@router.post("/discard", response_model=schemas.TeachingJob, responses=_publish_errors)
async def discard(request: Request, body: schemas.DiscardBody) -> Response:
    """Leave the model as it is, and remove the candidate of a job."""
    from serving.teaching.api.views import job_view

    return await _answer(request, lambda teacher, who: job_view(teacher.discard(body.job, who)))


@router.get("/classes", response_model=schemas.ClassList)
async def teach_classes(request: Request, query: Annotated[ClassesQuery, Query()]) -> Response:
    """All classes, with counts and some examples."""
    from serving.teaching.api.views import class_views

    most = request.app.state.settings.max_body
    return await _answer(request, lambda teacher, who: class_views(teacher, query.examples, most))


@router.post("/classes", response_model=schemas.ClassChanged, responses=_class_errors)
async def begin_class(request: Request, body: schemas.ClassBody) -> Response:
    """Begin a class that has no example yet."""

    def begin(teacher: Teacher, who: str) -> schemas.ClassChanged:
        from serving.teaching.class_changes import all_labels
        from serving.teaching.curriculum import check_label

        check_label(plain(body.label))
        if same_label(body.label, all_labels(teacher)) is not None:
            raise errors.ClassExistsError("the class exists", got=repr(body.label), allowed="a new name")
        teacher.store.begin_class(body.label, who)
        return schemas.ClassChanged(items=0, job=None)

    return await _answer(request, begin)


@router.post("/classes/rename", response_model=schemas.ClassChanged, responses=_class_errors)
async def rename_class(request: Request, body: schemas.RenameBody, query: Annotated[ChangeQuery, Query()]) -> Response:
    """Give a class another name."""

    return await _change_class(
        request, lambda changes, *given: changes.rename(*given, body.label, body.to, accept=query.accept)
    )


@router.post("/classes/merge", response_model=schemas.ClassChanged, responses=_class_errors)
async def merge_classes(
    request: Request, body: schemas.MergeClassesBody, query: Annotated[ChangeQuery, Query()]
) -> Response:
    """Make the examples of classes those of another class."""
    return await _change_class(
        request, lambda changes, *given: changes.merge(*given, body.labels, body.into, accept=query.accept)
    )


@router.post("/classes/delete", response_model=schemas.ClassChanged, responses=_class_errors)
async def delete_class(
    request: Request, body: schemas.DeleteClassBody, query: Annotated[ChangeQuery, Query()]
) -> Response:
    """Take a class out, as if it had never been learned. Its images are deleted only once the result is served."""
    images = body.examples == "delete"
    return await _change_class(
        request, lambda changes, *given: changes.delete(*given, body.label, images=images, accept=query.accept)
    )


@router.get("/examples", response_model=schemas.ExampleList)
async def teach_examples(request: Request, query: Annotated[ExamplesQuery, Query()]) -> Response:
    """Labelled images."""
    from serving.teaching.api.views import example_views

    return await _answer(
        request,
        lambda teacher, who: example_views(teacher, query.label, query.state, after=query.after, limit=query.limit),
    )


@router.post(
    "/examples",
    response_model=schemas.AddedExample,
    responses=_upload_errors,
    openapi_extra={
        "requestBody": {
            "description": "One PNG, JPEG, WebP or BMP file. Not a form, which another site could send.",
            "required": True,
            "content": {"image/*": {"schema": FILE_SCHEMA}, "application/octet-stream": {"schema": FILE_SCHEMA}},
        }
    },
)
async def add_example(request: Request, query: Annotated[UploadQuery, Query()]) -> Response:
    """Store an image, and label it; the response has the answer of the served model for it."""
    settings, loaded = request.app.state.settings, _engine(request).loaded
    limits = Limits(settings.max_bytes, settings.max_pixels, settings.max_side)

    def add(teacher: Teacher, who: str, content: bytes) -> schemas.AddedExample:
        from serving.quarantine.labels import check_label
        from serving.teaching.intake import store_example

        label = None if query.label is None else check_label(query.label, loaded.model.manifest.labels)
        stored = store_example(teacher.store, loaded, content, limits, label, who)
        answer = Answer.model_validate(stored.answer)
        return schemas.AddedExample(
            id=stored.id,
            label=label if label is not None else stored.label_before,
            duplicate=stored.duplicate,
            label_before=stored.label_before,
            answer=answer,
        )

    async with _file(request, settings.max_bytes) as content:
        return await _answer(request, partial(add, content=content))


@router.post("/examples/label", response_model=Changed, responses=_change_errors)
async def label_examples(request: Request, body: LabelBody) -> Response:
    """Make images of the quarantine examples of a class, new or known."""

    def label(teacher: Teacher, who: str) -> Changed:
        ids = list(dict.fromkeys(body.ids or ()))
        if body.group is not None:
            members = teacher.store.members(body.group)
            if not members:
                raise UnknownIdError(f"no group {body.group}")
            ids = [number for number, state in members.items() if state not in ("junk", "learned")] or list(members)
        teacher.store.teach(ids, body.label, teacher.current().labels, who)
        return Changed(items=tuple(ids))

    return await _answer(request, label)


@router.post("/examples/remove", response_model=Changed, responses=_change_errors)
async def remove_examples(request: Request, body: schemas.RemoveBody) -> Response:
    """Make images no longer examples; the next lesson takes them out of the model."""

    def remove(teacher: Teacher, who: str) -> Changed:
        teacher.store.withdraw(body.ids, who)
        return Changed(items=tuple(dict.fromkeys(body.ids)))

    return await _answer(request, remove)


@router.post("/feedback", response_model=Changed, responses=_change_errors)
async def feedback(request: Request, body: schemas.FeedbackBody) -> Response:
    """Confirm the answer for an image in the quarantine, or give the class that the image shows."""

    def judge(teacher: Teacher, who: str) -> Changed:
        found = teacher.store.items(ids=[body.id])
        if not found:
            raise UnknownIdError(f"no item {body.id}")
        label = found[0].answer.get("best_guess") if body.right else body.label
        if not isinstance(label, str):
            raise LabelError(f"item {body.id} has no best guess; allowed: give its class")
        teacher.store.teach([body.id], label, teacher.current().labels, who)
        return Changed(items=(body.id,))

    return await _answer(request, judge)


@router.get("/loose", response_model=schemas.LooseList)
async def loose(request: Request, query: Annotated[PageQuery, Query()]) -> Response:
    """Unlabelled images in no group, with the group that each resembles most."""
    from serving.teaching.api.views import loose_views

    return await _answer(request, lambda teacher, who: loose_views(teacher.store, after=query.after, limit=query.limit))


@router.post("/groups/split", response_model=schemas.SplitGroup, responses=_change_errors)
async def split_group(request: Request, body: schemas.RemoveBody) -> Response:
    """Make images a group of their own."""
    return await _answer(request, lambda teacher, who: schemas.SplitGroup(group=teacher.store.split(body.ids, who)))


@router.get("/versions", response_model=schemas.VersionList)
async def teach_versions(request: Request) -> Response:
    """The versions on the shelf."""
    from serving.teaching.api.views import version_views

    return await _answer(request, lambda teacher, who: version_views(teacher))


@router.post("/rollback", response_model=schemas.Accepted, responses=_publish_errors)
async def teach_rollback(request: Request, body: schemas.RollbackBody) -> Response:
    """Serve a version of the shelf again."""
    return await _answer(
        request, lambda teacher, who: schemas.Accepted(**teacher.roll_back(body.version, who)._asdict())
    )


@router.get("/log", response_model=schemas.Log)
async def teach_log(request: Request, query: Annotated[LogQuery, Query()]) -> Response:
    """Who did what, the latest first."""
    return await _answer(
        request,
        lambda teacher, who: schemas.Log(
            changes=tuple(ChangeEntry(**change._asdict()) for change in teacher.store.changes(query.limit))
        ),
    )


@router.get(
    "/export",
    response_class=Response,
    responses=file_response("an archive of labels and images", "application/zip", x_openworld_parts=3),
)
async def export_examples(request: Request, query: Annotated[ExportQuery, Query()]) -> Response:
    """Labels and images as an archive, or as several that are small enough to be imported.

    The header x-openworld-parts has the number of parts. The archive for Label Studio has tasks, images and a labelling
    configuration.
    """
    from serving.teaching.class_changes import all_labels
    from serving.teaching.exporting import export_archive, parts_of

    most = request.app.state.settings.max_body

    def export(teacher: Teacher, who: str) -> tuple[int, Iterator[bytes]]:
        labels = tuple(dict.fromkeys([*teacher.current().labels, *sorted(all_labels(teacher))]))
        examples = teacher.store.examples(query.label)
        parts = parts_of(examples, most, labels)
        if query.part is not None:
            if query.part > len(parts):
                raise errors.ParameterError("no such part", got=str(query.part), allowed=f"1 to {len(parts)}")
            examples = list(parts[query.part - 1])
        return len(parts), export_archive(teacher.store, query.format, examples, labels, query.part)

    count, pieces = await _ask(request, export)
    part = "" if query.part is None else f"-{query.part}-of-{count}"
    name = f'attachment; filename="examples-{query.format}{part}.zip"'
    headers = {**PRIVATE, "content-disposition": name, "x-openworld-parts": str(count)}
    return StreamingResponse(pieces, media_type="application/zip", headers=headers)


@router.post(
    "/import",
    response_model=schemas.Imported,
    responses=_upload_errors,
    openapi_extra={
        "requestBody": {
            "description": "A zip archive with a folder of images per class, or Label Studio's JSON or JSON-MIN beside "
            "its images; or such JSON with data: URLs. Nothing is fetched.",
            "required": True,
            "content": {
                "application/zip": {"schema": FILE_SCHEMA},
                "application/json": {"schema": {"type": "array", "items": {"type": "object"}}},
            },
        }
    },
)
async def import_examples(request: Request) -> Response:
    """Add labelled images from an archive."""
    settings, loaded = request.app.state.settings, _engine(request).loaded
    limits = Limits(settings.max_bytes, settings.max_pixels, settings.max_side)

    def add(teacher: Teacher, who: str, content: bytes) -> schemas.Imported:
        from serving.teaching.exchange import import_archive

        return import_archive(teacher.store, loaded, content, limits, who)

    async with _file(request, settings.max_body) as content:
        return await _answer(request, partial(add, content=content))


@contextlib.asynccontextmanager
async def _file(request: Request, most: int) -> AsyncIterator[bytes]:
    """The body of an upload, read within the deadline of a request; it counts in the byte budget while it is used."""
    settings = request.app.state.settings
    predictions: Predictions = request.app.state.predictions
    announced = request.headers.get("content-length", "")
    with predictions.inflight.request() as reserve:
        try:
            async with asyncio.timeout(settings.deadline):
                content = await read_body(request.receive, announced, most, reserve)
        except TimeoutError:
            allowed = f"{settings.deadline:g} seconds from the request's head to the end of its body"
            raise errors.DeadlineError("the deadline passed", got="part of a body", allowed=allowed) from None
        yield content


async def _change_class(request: Request, change: Callable[..., Any]) -> Response:
    """Respond to a change of classes; `change` is called with the module, the teacher and the user."""

    def work(teacher: Teacher, who: str) -> schemas.ClassChanged:
        from serving.teaching import class_changes
        from serving.teaching.api.views import job_view

        items, job = change(class_changes, teacher, who)
        return schemas.ClassChanged(items=items, job=None if job is None else job_view(job))

    return await _answer(request, work)


async def _answer(request: Request, work: Callable[[Teacher, str], ApiModel], status: int = 200) -> Response:
    answer = await _ask(request, work)
    return Response(answer.model_dump_json(), status, media_type="application/json", headers=PRIVATE)


async def _ask(request: Request, work: Callable[[Teacher, str], T]) -> T:
    """Run work with the teacher, for the named user, in a thread; its errors become responses."""
    teacher = _engine(request).teacher
    who = RequestContext.of(request).user
    if request.app.state.settings.teach == "off":
        raise errors.TeachOffError("teaching is off", got="OPENWORLD_TEACH=off", allowed="on, auto")
    if teacher is None:
        raise errors.QuarantineOffError(
            "there is no quarantine",
            got="OPENWORLD_QUARANTINE_URL not set",
            allowed="a server with OPENWORLD_QUARANTINE_URL set, as in sqlite:////var/lib/openworld/quarantine.db",
        )
    try:
        with translated():
            return await asyncio.get_running_loop().run_in_executor(_threads, work, teacher, who)
    except TeachError as error:
        got, _, allowed = str(error).partition("; allowed: ")
        raise errors.BadLabelError("cannot be taught", got=got, allowed=allowed or "another one") from None


def _engine(request: Request) -> Engine:
    return cast(Engine, request.app.state.engine())
