"""The server: bentoml serve serving.service:OpenWorld"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from typing import cast

import bentoml
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope

from serving.answer import describe
from serving.bento import LeanService, WholeRequest
from serving.edge import Edge
from serving.logs import log_as
from serving.machine import Plan, available_cpus, plan
from serving.meter import Meter
from serving.metrics import LIMIT, MODEL, exposition, forget_dead_workers
from serving.openapi import document
from serving.page import routes as page_routes
from serving.predictions import Predictions, Reply
from serving.preflight import BAD_SETTINGS_OR_BUNDLE, check_in_child
from serving.preprocess import Limits
from serving.queue import InferenceQueue, best_batch
from serving.runtime import Model
from serving.schemas import Answer, Answers
from serving.settings import Settings, SettingsError


async def _model(request: Request) -> Response:
    queue: InferenceQueue = request.app.state.queue
    described = describe(queue.model, max_batch=queue.max_batch)
    return Response(described.model_dump_json(by_alias=True), media_type="application/json")


async def _docs(request: Request) -> Response:
    return JSONResponse(document())


async def _metrics(request: Request) -> Response:
    request.app.state.meter.write()
    return Response(await asyncio.to_thread(exposition), media_type="text/plain; version=0.0.4; charset=utf-8")


pages = Starlette(
    routes=[Route("/model", _model), Route("/docs.json", _docs), Route("/metrics", _metrics), *page_routes]
)


def _around(app: ASGIApp) -> ASGIApp:
    """BentoML's application in a layer of our own, for one worker."""
    pages.state.settings = settings = Settings.from_environment()
    pages.state.meter = meter = Meter(window=settings.window)
    log_as(settings.log)

    async def one(scope: Scope, receive: Receive) -> Reply:
        return await cast(Predictions, pages.state.predictions).one(scope, receive)

    async def many(scope: Scope, receive: Receive) -> Reply:
        return await cast(Predictions, pages.state.predictions).many(scope, receive)

    # BentoML's layers cost more than a small answer itself; only they can trace, though.
    return Edge(app, settings, meter, {} if settings.tracing else {"/predict": one, "/predict_many": many})


LeanService.around = _around


def _settings() -> Settings:
    try:
        return Settings.from_environment()
    except SettingsError:
        # The deployment hook says so and stops the server: to import a module does not end a process.
        return Settings()


@bentoml.service(
    name="openworld",
    service_class=LeanService,
    workers=plan(_settings(), available_cpus()).workers,
    metrics={"enabled": False},
    logging={"access": {"enabled": False}},
    tracing={"excluded_urls": "livez,readyz,healthz,metrics"},
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
        log_as(settings.log)
        # The workers inherit it, and may run in another directory.
        os.environ["OPENWORLD_BUNDLE"] = str(settings.bundle)
        if code := check_in_child(settings):
            sys.exit(code)

    def __init__(self) -> None:
        settings: Settings = pages.state.settings
        meter: Meter = pages.state.meter
        share: Plan = plan(settings, available_cpus())
        model = Model.load(settings.bundle, provider=settings.provider, threads=share.threads)
        model.self_test()
        self.queue = InferenceQueue(
            model,
            meter,
            limit=settings.queue,
            # One more than can run at a time, so that a huge image does not hold up the small ones behind it.
            threads=share.threads + 1,
            max_batch=settings.batch or best_batch(model),
            limits=Limits(settings.max_bytes, settings.max_pixels),
        )
        self.predictions = Predictions(self.queue, meter, settings)
        pages.state.queue, pages.state.predictions = self.queue, self.predictions
        forget_dead_workers()
        meter.watch(lambda: self.queue.depth)
        LIMIT.set(settings.queue)
        MODEL.labels(model.manifest.name, model.manifest.version, model.provider).set(1)
        # What lives as long as the server is not worth scanning; long pauses are a request's p99.
        gc.freeze()
        gc.set_threshold(50_000, 20, 1000)

    @bentoml.on_shutdown
    def close(self) -> None:
        """All accepted requests have been answered by now."""
        self.queue.close()
        pages.state.meter.write()

    # BentoML shows these to its own clients, and calls them when it traces; else the layer around it answers first.
    @bentoml.api(input_spec=WholeRequest, output_spec=Answer)
    async def predict(self, request: Request) -> Response:
        """Say what an image shows, or that it is unknown."""
        return _response(await self.predictions.one(request.scope, request.receive))

    @bentoml.api(input_spec=WholeRequest, output_spec=Answers)
    async def predict_many(self, request: Request) -> Response:
        """Say what each of several images shows; a bad one spoils only its own answer."""
        return _response(await self.predictions.many(request.scope, request.receive))


def _response(reply: Reply) -> Response:
    return Response(reply.body, reply.status, reply.headers, media_type="application/json")
