"""The server: bentoml serve serving.service:OpenWorld"""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import os
import sys
from pathlib import Path
from typing import cast

import bentoml
from prometheus_client import Gauge
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope

from serving.admin import routes as admin_routes
from serving.answer import describe
from serving.bento import LeanService, WholeRequest, home, start_lean_workers
from serving.bundle import BundleError
from serving.edge import Edge
from serving.errors import RequestError
from serving.follow import Follower
from serving.group import VARIABLE as GROUP_VARIABLE
from serving.group import Group
from serving.logs import log_as
from serving.machine import Plan, available_cpus, plan
from serving.memory import keep_large_blocks_apart
from serving.meter import Meter
from serving.metrics import LIMIT, MODEL, exposition, forget_dead_workers
from serving.page import routes as page_routes
from serving.predictions import REFUSED, REQUEST_ID, Predictions, Reply
from serving.preflight import BAD_SETTINGS_OR_BUNDLE, check_in_child, first_bundle, found_group
from serving.preprocess import Limits
from serving.quarantine import keeper_of
from serving.queue import InferenceQueue
from serving.runtime import Model
from serving.schemas import Answer, Answers, error_answer
from serving.served import Served
from serving.settings import PREFIX, Settings, SettingsError
from serving.swap import Swaps
from serving.unknowns.routes import routes as unknowns_routes

KEEPER_PATIENCE = 5.0
"""Seconds at the end of a server for what it has still to write."""


async def _model(request: Request) -> Response:
    queue: InferenceQueue = request.app.state.queue
    described = describe(queue.served.model, max_batch=queue.served.max_batch)
    return Response(described.model_dump_json(by_alias=True), media_type="application/json")


async def _docs(request: Request) -> Response:
    return Response(await asyncio.to_thread(_described), media_type="application/json")


@functools.cache
def _described() -> bytes:
    """Worked out when it is first asked for: that takes longer than many answers."""
    from serving.openapi import document

    return json.dumps(document(), separators=(",", ":")).encode()


async def _metrics(request: Request) -> Response:
    request.app.state.meter.write()
    return Response(await asyncio.to_thread(exposition), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _refused(request: Request, error: Exception) -> Response:
    """What a page raises, in the shape that every error has."""
    assert isinstance(error, RequestError)
    request.app.state.meter.rejected(error.code)
    request.scope[REFUSED] = error.code
    said = error_answer(error, request.scope.get(REQUEST_ID)).model_dump_json()
    return Response(said, error.status, error.headers, media_type="application/json")


pages = Starlette(
    routes=[
        Route("/model", _model),
        Route("/docs.json", _docs),
        Route("/metrics", _metrics),
        *admin_routes,
        *unknowns_routes,
        *page_routes,
    ],
    exception_handlers={RequestError: _refused},
)
# Whoever asks for `/predict/` would be sent to a host and a scheme that the request made up.
pages.router.redirect_slashes = False


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
        start_lean_workers()
        # The workers inherit it, and may run in another directory.
        if settings.bundles is None:
            os.environ["OPENWORLD_BUNDLE"] = str(settings.bundle)
        else:
            os.environ["OPENWORLD_BUNDLES"] = str(settings.bundles)
        for name in ("quarantine_url", "quarantine_images"):
            if value := getattr(settings, name):
                os.environ[PREFIX + name.upper()] = value
        try:
            bundle = first_bundle(settings)
            if code := check_in_child(settings, bundle):
                sys.exit(code)
            if settings.swappable:
                os.environ[GROUP_VARIABLE] = str(found_group(settings, bundle, home()).folder)
        except BundleError as error:
            print(error, file=sys.stderr)
            sys.exit(BAD_SETTINGS_OR_BUNDLE)

    def __init__(self) -> None:
        settings: Settings = pages.state.settings
        meter: Meter = pages.state.meter
        share: Plan = plan(settings, available_cpus())
        keep_large_blocks_apart()

        def load(path: Path) -> Served:
            model = Model.load(
                path,
                provider=settings.provider,
                precision=settings.precision,
                threads=share.threads,
                alpha=settings.alpha,
            )
            model.self_test()
            return Served.of(model, settings.batch)

        self.follower: Follower | None = None
        self.swaps: Swaps | None = None
        if settings.swappable:
            group = _group(settings)
            self.follower = Follower(group, load, self.switch)
            self.swaps = Swaps(group, shelf=settings.bundles, bundle=settings.bundle)
        self.keeper = keeper_of(settings)
        self.queue = InferenceQueue(
            load(settings.bundle) if self.follower is None else self.follower.served,
            meter,
            limit=settings.queue,
            # One more than can run at a time, so that a huge image does not hold up the small ones behind it.
            threads=share.threads + 1,
            limits=Limits(settings.max_bytes, settings.max_pixels),
            keeper=self.keeper,
        )
        self.predictions = Predictions(self.queue, meter, settings)
        pages.state.queue, pages.state.predictions = self.queue, self.predictions
        pages.state.swaps, pages.state.keeper = self.swaps, self.keeper
        forget_dead_workers()
        meter.watch(lambda: self.queue.depth)
        LIMIT.set(settings.queue)
        _gauge(self.queue.served).set(1)
        if self.follower is not None and self.swaps is not None:
            self.follower.start(beside=self.swaps.watch)
        # What lives as long as the server is not worth scanning; long pauses are a request's p99.
        gc.freeze()
        gc.set_threshold(50_000, 20, 1000)
        gc.enable()

    def switch(self, served: Served) -> None:
        """Answer with another model from the next request on; called in a thread of its own."""
        before, self.queue.served = self.queue.served, served
        forget_dead_workers()
        _gauge(before).set(0)
        _gauge(served).set(1)

    @bentoml.on_shutdown
    def close(self) -> None:
        """All accepted requests have been answered by now."""
        if self.swaps is not None:
            self.swaps.close()
        if self.follower is not None:
            self.follower.close()
        self.queue.close()
        if self.keeper is not None:
            self.keeper.close(KEEPER_PATIENCE)
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


def _group(settings: Settings) -> Group:
    if folder := os.environ.get(GROUP_VARIABLE):
        return Group(Path(folder))
    # A worker that nobody deployed is a group of its own.
    return found_group(settings, first_bundle(settings), home())


def _gauge(served: Served) -> Gauge:
    manifest = served.model.manifest
    return MODEL.labels(manifest.name, manifest.version, served.model.provider)


def _response(reply: Reply) -> Response:
    return Response(reply.body, reply.status, reply.headers, media_type="application/json")
