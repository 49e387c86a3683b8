"""A minimal server in FastAPI: raw body, on the event loop, no queue, limits, metrics, logs or request ids."""

from __future__ import annotations

import json

from fastapi import FastAPI, Request, Response

from tests.benchmarks.bare import Answering


def make_app() -> FastAPI:
    app, answering = FastAPI(), Answering()

    @app.post("/predict")
    async def predict(request: Request) -> Response:
        fields = answering.answer(await request.body())
        return Response(json.dumps(fields, separators=(",", ":")), media_type="application/json")

    @app.get("/readyz")
    async def ready() -> str:
        return "ready"

    return app
