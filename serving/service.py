"""The server: bentoml serve serving.service:OpenWorld"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, cast

import bentoml
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from serving.answer import Question, describe
from serving.bento import LeanService, WholeRequest
from serving.edge import REFUSED, REQUEST_ID, SCHEMA_HEADER, Edge
from serving.errors import ClientGoneError, DeadlineError, RequestError
from serving.logs import log_as
from serving.machine import Plan, available_cpus, plan
from serving.meter import Meter
from serving.metrics import LIMIT, MODEL, exposition, forget_dead_workers
from serving.openapi import complete
from serving.page import routes as page_routes
from serving.patience import Watch
from serving.preflight import BAD_SETTINGS_OR_BUNDLE, check_in_child
from serving.preprocess import Limits
from serving.queue import InferenceQueue, best_batch
from serving.runtime import Model
from serving.schemas import Answer, Answers, error_answer
from serving.settings import Settings, SettingsError
from serving.upload import Upload, limit_for_many, limit_for_one, read_body, read_question


async def _model(request: Request) -> Response:
    queue: InferenceQueue = request.app.state.queue
    return _json(describe(queue.model, max_batch=queue.max_batch).model_dump_json(by_alias=True))


async def _docs(request: Request) -> Response:
    return JSONResponse(complete(cast(Any, OpenWorld).openapi_spec.asdict()))


async def _metrics(request: Request) -> Response:
    request.app.state.meter.write()
    return Response(await asyncio.to_thread(exposition), media_type="text/plain; version=0.0.4; charset=utf-8")


def _json(content: str | bytes, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    response = Response(content, status_code=status, headers=headers, media_type="application/json")
    response.raw_headers.append(SCHEMA_HEADER)
    return response


pages = Starlette(
    routes=[Route("/model", _model), Route("/docs.json", _docs), Route("/metrics", _metrics), *page_routes]
)


def _around(app: ASGIApp) -> ASGIApp:
    pages.state.settings = settings = Settings.from_environment()
    pages.state.meter = Meter(window=settings.window)
    log_as(settings.log)
    return Edge(app, settings, pages.state.meter)


LeanService.around = _around


def _plan() -> Plan:
    try:
        return plan(Settings.from_environment(), available_cpus())
    except SettingsError:
        # Said, and the server stopped, by the deployment hook: importing a module does not end a process.
        return Plan(workers=1, threads=1)


@bentoml.service(
    name="openworld",
    service_class=LeanService,
    workers=_plan().workers,
    metrics={"enabled": False},
    logging={"access": {"enabled": False}},
    tracing={"excluded_urls": "predict"},
)
@bentoml.asgi_app(pages)
class OpenWorld:
    """Tells what an image shows, or that it shows nothing that was taught."""

    @bentoml.on_deployment
    @staticmethod
    def refuse_what_cannot_be_served() -> None:
        try:
            settings = Settings.from_environment()
        except SettingsError as error:
            print(error, file=sys.stderr)
            sys.exit(BAD_SETTINGS_OR_BUNDLE)
        # The workers inherit it, and may run in another directory.
        os.environ["OPENWORLD_BUNDLE"] = str(settings.bundle)
        if code := check_in_child(settings):
            sys.exit(code)

    def __init__(self) -> None:
        self.settings: Settings = pages.state.settings
        self.meter: Meter = pages.state.meter
        cpus = plan(self.settings, available_cpus()).threads
        model = Model.load(self.settings.bundle, provider=self.settings.provider, threads=cpus)
        model.self_test()
        self.queue = InferenceQueue(
            model,
            self.meter,
            limit=self.settings.queue,
            # One more than can run at a time, so that a huge image does not hold up the small ones behind it.
            threads=cpus + 1,
            max_batch=self.settings.batch or best_batch(model),
            limits=Limits(self.settings.max_bytes, self.settings.max_pixels),
        )
        self.default = read_question(model, b"")
        pages.state.queue = self.queue
        self._count_from_here()

    def _count_from_here(self) -> None:
        forget_dead_workers()
        self.meter.watch(lambda: self.queue.depth)
        LIMIT.set(self.settings.queue)
        model = self.queue.model
        MODEL.labels(model.manifest.name, model.manifest.version, model.provider).set(1)
        # What lives as long as the server is not worth scanning; long pauses are a request's p99.
        gc.collect()
        gc.freeze()
        gc.set_threshold(50_000, 20, 1000)

    @bentoml.on_shutdown
    def close(self) -> None:
        """All accepted requests have been answered by now."""
        self.queue.close()
        self.meter.write()

    @bentoml.api(input_spec=WholeRequest, output_spec=Answer)
    async def predict(self, request: Request) -> Response:
        """Say what an image shows, or that it is unknown."""
        return await self._answered(request, self._one)

    @bentoml.api(input_spec=WholeRequest, output_spec=Answers)
    async def predict_many(self, request: Request) -> Response:
        """Say what each of several images shows; a bad one spoils only its own answer."""
        return await self._answered(request, self._many)

    async def _answered(self, request: Request, answer: Callable[[Request], Awaitable[str]]) -> Response:
        try:
            async with asyncio.timeout(self.settings.deadline):
                return _json(await answer(request))
        except RequestError as error:
            refused = error
        except TimeoutError:
            got, allowed = "no answer", f"{self.settings.deadline:g} seconds from the request's head to its answer"
            refused = DeadlineError("the deadline passed", got=got, allowed=allowed)
        self.meter.rejected(refused.code)
        request.scope[REFUSED] = refused.code
        body = error_answer(refused, request.scope[REQUEST_ID]).model_dump_json()
        return _json(body, refused.status, refused.headers)

    async def _one(self, request: Request) -> str:
        question = self._question(request)
        with self.queue.admitted():
            upload = await self._upload(request, limit_for_one, self.settings.max_bytes)
            done = self.queue.ask(upload.image, question)
            with Watch(request.receive, [done]) as watch:
                try:
                    return await done
                except asyncio.CancelledError:
                    if watch.gone:
                        raise _gone() from None
                    raise

    async def _many(self, request: Request) -> str:
        question = self._question(request)
        with self.queue.admitted():
            upload = await self._upload(request, limit_for_many, self.settings.max_body)
            images = await asyncio.to_thread(upload.images, self.settings.max_images)
            with self.queue.admitted(len(images) - 1):
                said = await self._each(request, images, question)
        return f'{{"answers":[{",".join(said)}]}}'

    async def _each(self, request: Request, images: list[bytes | RequestError], question: Question) -> list[str]:
        asked = [self.queue.ask(partial(_same, image), question) for image in images]
        with Watch(request.receive, asked) as watch:
            outcomes = await asyncio.gather(*asked, return_exceptions=True)
        if watch.gone:
            raise _gone()
        return [self._said(outcome) for outcome in outcomes]

    def _said(self, outcome: str | BaseException) -> str:
        if isinstance(outcome, str):
            return outcome
        if not isinstance(outcome, RequestError):
            raise outcome
        self.meter.rejected(outcome.code)
        return error_answer(outcome).model_dump_json(exclude_none=True)

    def _question(self, request: Request) -> Question:
        query: bytes = request.scope["query_string"]
        return read_question(self.queue.model, query) if query else self.default

    async def _upload(self, request: Request, limit: Callable[[str, int], int], size: int) -> Upload:
        content_type = announced = b""
        for name, value in request.scope["headers"]:
            if name == b"content-type":
                content_type = value
            elif name == b"content-length":
                announced = value
        kind = content_type.decode("latin-1")
        return Upload(kind, await read_body(request.receive, announced, limit(kind, size)))


def _same(image: bytes | RequestError) -> bytes:
    if isinstance(image, RequestError):
        raise image
    return image


def _gone() -> ClientGoneError:
    return ClientGoneError("nobody waits for the answer", got="a closed connection", allowed="an open one")
