"""What a worker answers with: its pages, its predictions, and the layer around both.

Workers alone import it. What `bentoml serve` imports before it starts them is in `serving.service`.
"""

from __future__ import annotations

import asyncio
import functools
import json
from typing import cast

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope

from serving.admin import routes as admin_routes
from serving.answer import describe
from serving.edge import Edge
from serving.engine import Engine
from serving.errors import RequestError
from serving.logs import log_as
from serving.meter import Meter
from serving.metrics import exposition
from serving.page import routes as page_routes
from serving.predictions import REFUSED, REQUEST_ID, Predictions, Reply
from serving.queue import InferenceQueue
from serving.schemas import error_answer
from serving.settings import Settings
from serving.unknowns.routes import routes as unknowns_routes


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


def around(app: ASGIApp) -> ASGIApp:
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


def started_engine() -> Engine:
    """What answers the pages from now on."""
    engine = Engine(pages.state.settings, pages.state.meter)
    pages.state.queue, pages.state.predictions = engine.queue, engine.predictions
    pages.state.swaps, pages.state.keeper = engine.swaps, engine.keeper
    engine.start()
    return engine
