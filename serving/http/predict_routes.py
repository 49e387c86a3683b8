"""The routes /predict and /predict_many."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from fastapi import Query
from fastapi.routing import APIRoute
from pydantic.json_schema import SkipJsonSchema
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from serving import errors
from serving.errors import DeadlineError, RequestError
from serving.http.context import RequestContext
from serving.http.guards import Guard, GuardedRouter
from serving.http.inflight_bytes import InflightBytes, Reserve
from serving.http.openapi import FILE_SCHEMA
from serving.http.schemas import (
    Answer,
    Answers,
    ApiModel,
    Explain,
    ImageBody,
    ImagesBody,
    Number,
    Whole,
    error_answer,
    field,
)
from serving.http.upload import FORM, JSON, RAW, Upload, limit_for_many, limit_for_one, media_type, read_body
from serving.inference.answers import DEFAULT_TOP, PredictionOptions
from serving.inference.job import ReadImage
from serving.inference.loaded import LoadedModel
from serving.inference.queue import InferenceQueue
from serving.settings import Settings
from serving.telemetry import metrics


class PredictionQuery(ApiModel):
    """The parameters of a prediction."""

    task: Whole | SkipJsonSchema[None] = field("predict within this task", 2, default=None, ge=0)
    alpha: Number | SkipJsonSchema[None] = field(
        "share of known images that may be called unknown", 0.05, default=None, gt=0, lt=1
    )
    top: Whole | SkipJsonSchema[None] = field(
        f"how many classes to list; {DEFAULT_TOP} by default", 3, default=None, ge=1
    )
    store: bool = field("false: the quarantine does not keep the image, even if it is unknown", False, default=True)

    explain: Explain | SkipJsonSchema[None] = field(
        "whether to return where in the image the evidence lies: as numbers (true), or also as an image (png)",
        "true",
        default=None,
    )

    def options(self, loaded: LoadedModel) -> PredictionOptions:
        """The options for a model; a ParameterError if the model cannot satisfy them."""
        if self.task is self.alpha is self.top is None and self.explain is None and self.store:
            return loaded.default_options
        return PredictionOptions.for_model(
            loaded.model, task=self.task, alpha=self.alpha, top=self.top, explain=self.explain, store=self.store
        )


DEFAULTS = PredictionQuery()


class UploadedImages(NamedTuple):
    """The images of an upload, and the number of bytes that they are read from; None if reading them takes a thread."""

    read: Sequence[ReadImage]
    size: int | None
    query: PredictionQuery | None = None
    """Parameters that the body contains, and not the URL."""


SplitUpload = Callable[[Upload], Awaitable[UploadedImages]]
Outcomes = list[str | RequestError]


class Predictions:
    """Reads uploads, or image files, within the limits and passes their images to the queue."""

    def __init__(self, settings: Settings, queue: Callable[[], InferenceQueue]) -> None:
        self._settings = settings
        self._queue = queue
        self.inflight = InflightBytes(settings.max_held)

    async def one(self, request: Request, query: PredictionQuery) -> str:
        """The answer for the one image in a request, as JSON."""
        limit = partial(limit_for_one, size=self._settings.max_bytes)
        (outcome,) = await self._outcomes(request, query, limit, _single_image)
        if isinstance(outcome, RequestError):
            raise outcome
        return outcome

    async def many(self, request: Request, query: PredictionQuery) -> str:
        """The answers for all images in a request, as JSON; an invalid image yields an error in its own place."""
        limit = partial(limit_for_many, size=self._settings.max_body)
        outcomes = await self._outcomes(request, query, limit, self._all_images)
        return f'{{"answers":[{",".join(map(_entry, outcomes))}]}}'

    async def split_by(self, request: Request, split: SplitUpload, content_types: Collection[str]) -> Outcomes:
        """The answers for the images that `split` finds in a body, each as JSON or as its error."""

        def limit(content_type: str) -> int:
            kind = media_type(content_type)
            if kind in ("", *content_types):
                return self._settings.max_body
            allowed = " or ".join(content_types)
            raise errors.MediaTypeError("body cannot be read", got=f"Content-Type {kind}", allowed=allowed)

        return await self._outcomes(request, DEFAULTS, limit, split)

    async def file(self, path: Path) -> str:
        """The answer for an image file, as JSON: for code in this process."""
        (outcome,) = await self._of_files([path], self._settings.max_bytes)
        if isinstance(outcome, RequestError):
            raise outcome
        return outcome

    async def files(self, paths: Sequence[Path]) -> Outcomes:
        """The answers for image files, each as JSON or as its error: for code in this process."""
        if not 1 <= len(paths) <= self.max_images:
            kind = errors.TooManyImagesError if paths else errors.MalformedRequestError
            raise kind("number of images", got=str(len(paths)), allowed=f"1 to {self.max_images}")
        return await self._of_files(paths, self._settings.max_body)

    @property
    def max_images(self) -> int:
        return self._settings.max_images

    async def _outcomes(
        self, request: Request, query: PredictionQuery, limit: Callable[[str], int], split: SplitUpload
    ) -> Outcomes:
        kind, announced = request.headers.get("content-type", ""), request.headers.get("content-length", "")

        async def receive(reserve: Reserve) -> UploadedImages:
            # No variable refers to the upload: copies of its images need not keep it in memory.
            return await split(Upload(kind, await read_body(request.receive, announced, limit(kind), reserve)))

        return await self._answered(receive, query, RequestContext.of(request).request_id, request.receive)

    async def _of_files(self, paths: Sequence[Path], most: int) -> Outcomes:
        """The answers for image files of at most `most` bytes together."""

        async def measure(reserve: Reserve) -> UploadedImages:
            size = sum(path.stat().st_size for path in paths)
            if size > most:
                raise errors.TooManyBytesError("files too large", got=f"{size} bytes", allowed=f"up to {most} bytes")
            reserve(size)
            return UploadedImages([path.read_bytes for path in paths], None)

        return await self._answered(measure, DEFAULTS)

    async def _answered(
        self,
        receive_images: Callable[[Reserve], Awaitable[UploadedImages]],
        query: PredictionQuery,
        request_id: str | None = None,
        receive: Receive | None = None,
    ) -> Outcomes:
        """The answers for the images that `receive_images` returns: within the queue, the bytes in flight and the
        deadline."""
        queue = self._queue()
        loaded = queue.loaded
        options = query.options(loaded)
        # If the queue is full, no body is read. Room is reserved only once a body is complete, so slow uploads block no
        # other request.
        queue.check_room()
        seconds = self._settings.deadline
        try:
            async with asyncio.timeout(seconds):
                with self.inflight.request() as reserve:
                    images = await receive_images(reserve)
                    if images.query is not None:
                        options = images.query.options(loaded)
                    return await queue.predict(
                        images.read, options, loaded, request_id=request_id, receive=receive, size=images.size
                    )
        except TimeoutError:
            allowed = f"{seconds:g} seconds from the request's head to its answer"
            raise DeadlineError("the deadline passed", got="no answer", allowed=allowed) from None

    async def _all_images(self, upload: Upload) -> UploadedImages:
        images = await asyncio.to_thread(upload.images, self._settings.max_images)
        return UploadedImages([partial(_unwrap, image) for image in images], len(upload.body))


async def _single_image(upload: Upload) -> UploadedImages:
    return UploadedImages([upload.image], len(upload.body))


def _unwrap(image: bytes | RequestError) -> bytes:
    if isinstance(image, RequestError):
        raise image
    return image


def _entry(outcome: str | RequestError) -> str:
    if isinstance(outcome, str):
        return outcome
    metrics.REJECTED.labels(outcome.code).inc()
    return error_answer(outcome).model_dump_json(exclude_none=True)


PREDICTION_ERRORS = (
    errors.MalformedRequestError,
    errors.TooManyBytesError,
    errors.TooManyPixelsError,
    errors.TooManyImagesError,
    errors.MediaTypeError,
    errors.ImageFormatError,
    errors.EmptyImageError,
    errors.BrokenImageError,
    errors.ParameterError,
    errors.OutputError,
    errors.BusyError,
    errors.QuarantineAwayError,
    errors.DeadlineError,
)


def _form(field: str, schema: object) -> dict[str, object]:
    return {"schema": {"type": "object", "properties": {field: schema}, "required": [field]}}


_FILE = {"schema": FILE_SCHEMA}
_ONE_BODY = {
    "description": "One PNG, JPEG, WebP or BMP image; the format is detected from its content.",
    "required": True,
    "content": {
        FORM: _form("image", FILE_SCHEMA),
        "image/*": _FILE,
        RAW: _FILE,
        JSON: {"schema": ImageBody.model_json_schema()},
    },
}
_MANY_BODY = {
    "description": "PNG, JPEG, WebP or BMP images, which are answered in order.",
    "required": True,
    "content": {
        FORM: _form("images", {"type": "array", "items": FILE_SCHEMA}),
        JSON: {"schema": ImagesBody.model_json_schema()},
    },
}


class PredictionRoute(APIRoute):
    """A request without parameters in its URL, as most are, needs none of FastAPI's parsing."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        parse_and_handle = super().get_route_handler()

        async def handle(request: Request) -> Response:
            if request.scope["query_string"]:
                return await parse_and_handle(request)
            response: Response = await self.endpoint(request, DEFAULTS)
            return response

        return handle


router = GuardedRouter(Guard.KEY, *PREDICTION_ERRORS, tags=["Predictions"], route_class=PredictionRoute)


@router.post("/predict", response_model=Answer, openapi_extra={"requestBody": _ONE_BODY})
async def predict(request: Request, query: Annotated[PredictionQuery, Query()]) -> Response:
    """Classify an image, or report that it is unknown."""
    predictions: Predictions = request.app.state.predictions
    return Response(await predictions.one(request, query), media_type=JSON)


@router.post("/predict_many", response_model=Answers, openapi_extra={"requestBody": _MANY_BODY})
async def predict_many(request: Request, query: Annotated[PredictionQuery, Query()]) -> Response:
    """Classify several images; an invalid image yields an error in its own place."""
    predictions: Predictions = request.app.state.predictions
    return Response(await predictions.many(request, query), media_type=JSON)
