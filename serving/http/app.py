"""The web application of a worker, which stands in front of BentoML's own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import cache, partial

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from serving.http import admin, open_inference, page, predict_routes
from serving.http.guards import Guard, GuardedPaths, GuardedRouter
from serving.http.middleware import RequestMiddleware
from serving.http.openapi import document, error_responses
from serving.http.predict_routes import Predictions
from serving.http.responses import handle_http_exception, handle_validation_error
from serving.http.schemas import DriftReport, ModelDescription
from serving.inference.answers import describe
from serving.inference.engine import Engine
from serving.quarantine.api import routes as unknowns
from serving.settings import Settings
from serving.teaching.api import routes as teach
from serving.telemetry.metrics import exposition

GetEngine = Callable[[], Engine]

router = APIRouter(tags=["Model"], responses=error_responses())
watched = GuardedRouter(Guard.KEY, tags=["Model"])
health = APIRouter(tags=["Health"], responses=error_responses())


@router.get("/model", response_model=ModelDescription)
async def model(request: Request) -> Response:
    """The model that is served."""
    loaded = request.app.state.engine().loaded
    described = describe(loaded.model, max_batch=loaded.max_batch)
    return Response(described.model_dump_json(by_alias=True), media_type="application/json")


@watched.get("/drift", response_model=DriftReport)
async def drift(request: Request) -> Response:
    """Whether the images that are answered are still like those before, over all workers."""
    queue = request.app.state.engine().queue
    loaded = queue.loaded
    fields = await asyncio.to_thread(queue.drift.report, loaded.version, loaded.tasks)
    return Response(DriftReport.model_validate(fields).model_dump_json(), media_type="application/json")


@health.get("/metrics", response_class=PlainTextResponse)
async def metrics() -> Response:
    """The metrics of all workers, for Prometheus."""
    return Response(await asyncio.to_thread(exposition), media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/docs.json", include_in_schema=False)
async def docs_json(request: Request) -> Response:
    """The API document; it is built in a thread at the first request, because that takes long."""
    return Response(await asyncio.to_thread(request.app.state.document), media_type="application/json")


class FromBentoML(Response):
    """Passes the request on to BentoML's application, which sends the response."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__()
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


@router.get("/schema.json", include_in_schema=False)
@router.get("/static_content/{file}", include_in_schema=False)
async def from_bentoml(request: Request) -> Response:
    """The description for BentoML's own clients, the files of the API reader, and the health routes below."""
    return FromBentoML(request.app.state.bentoml)


_HEALTH = {
    "livez": "Succeeds while the process is alive.",
    "healthz": "The same as /livez.",
    "readyz": "Succeeds once the model reproduces its golden answers.",
}
for _name, _description in _HEALTH.items():
    health.get(f"/{_name}", name=_name, response_class=PlainTextResponse, description=_description)(from_bentoml)


ROUTERS = (
    predict_routes.router,
    open_inference.router,
    open_inference.models,
    router,
    watched,
    health,
    admin.router,
    unknowns.router,
    teach.router,
    page.router,
)


def make_app(settings: Settings, engine: GetEngine, bentoml: ASGIApp) -> FastAPI:
    """The application; `engine` is called for every request, and `bentoml` answers the health routes.

    BentoML's own application must never receive a body from outside: it unpickles some content types and fetches URLs
    that it finds in forms. Only the GET routes above are passed on to it.
    """
    app = FastAPI(
        openapi_url=None,
        # A redirect would lead to the host and scheme that the request claims.
        redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,
        exception_handlers={HTTPException: handle_http_exception, RequestValidationError: handle_validation_error},
    )
    for included in ROUTERS:
        app.include_router(included)
    app.mount("/page", page.PageFiles(directory=page.STATIC))
    app.add_middleware(RequestMiddleware, settings=settings, routers=ROUTERS)
    app.state.settings, app.state.engine, app.state.bentoml = settings, engine, bentoml
    app.state.guarded = GuardedPaths.of(ROUTERS)
    app.state.predictions = Predictions(settings, lambda: engine().queue)
    app.state.document = cache(partial(_encoded_document, app))
    return app


def _encoded_document(app: FastAPI) -> bytes:
    return json.dumps(document(app), separators=(",", ":")).encode()
