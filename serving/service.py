"""The server: bentoml serve serving.service:OpenWorld"""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import bentoml
from _bentoml_sdk import IODescriptor
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from serving.answer import answer_image, describe, error_answer
from serving.errors import RequestError
from serving.openapi import complete
from serving.runtime import Model
from serving.schemas import Answer
from serving.upload import read_image, read_question

BUNDLE_VARIABLE, DEFAULT_BUNDLE = "OPENWORLD_BUNDLE", "runs/demo/bundle"
HOME = Path(__file__).resolve().parents[1]
"""The project, or its copy inside a built bento; the default bundle lies in it."""


class WholeRequest(IODescriptor):
    """The request as it came."""

    # BentoML's own reading of images has no limits, follows URLs and turns a bad image into a 500.
    __root_input__ = True

    image: str

    @classmethod
    async def from_http_request(cls, request: Request, serde: Any) -> Request:
        return request


def _bundle() -> Path:
    return Path(os.environ.get(BUNDLE_VARIABLE) or HOME / DEFAULT_BUNDLE).resolve()


async def _model(request: Request) -> Response:
    return _json(describe(request.app.state.model))


async def _docs(request: Request) -> Response:
    return JSONResponse(complete(cast(Any, OpenWorld).openapi_spec.asdict()))


def _json(content: BaseModel, status: int = 200) -> Response:
    return Response(content.model_dump_json(), status_code=status, media_type="application/json")


pages = Starlette(routes=[Route("/model", _model), Route("/docs.json", _docs)])


@bentoml.service(
    name="openworld",
    traffic={"timeout": 60, "max_concurrency": 256},
    tracing={"excluded_urls": "predict"},
)
@bentoml.asgi_app(pages)
class OpenWorld:
    """Tells what an image shows, or that it shows nothing that was taught."""

    @bentoml.on_deployment
    @staticmethod
    def refuse_bad_bundle() -> None:
        """Stop before a port is opened: a worker that fails would be started again and again."""
        # The workers inherit it, and may run in another directory.
        os.environ[BUNDLE_VARIABLE] = bundle = str(_bundle())
        # In a process of its own, so that this one, which lives on, never holds a GPU.
        check = subprocess.run([sys.executable, "-m", "serving.predict", bundle], cwd=HOME, check=False)
        if check.returncode:
            sys.exit(check.returncode)

    def __init__(self) -> None:
        self.model = Model.load(_bundle())
        self.model.self_test()
        self.threads = ThreadPoolExecutor(max_workers=os.cpu_count() or 1, thread_name_prefix="answer")
        pages.state.model = self.model
        # What lives as long as the server is not worth scanning; long pauses are a request's p99.
        gc.collect()
        gc.freeze()
        gc.set_threshold(50_000, 20, 1000)

    @bentoml.api(input_spec=WholeRequest, output_spec=Answer)
    async def predict(self, request: Request) -> Response:
        """Say what an image shows, or that it is unknown."""
        try:
            question = read_question(self.model, request.query_params)
            content = await read_image(request)
            loop = asyncio.get_running_loop()
            return _json(await loop.run_in_executor(self.threads, answer_image, self.model, content, question))
        except RequestError as error:
            return _json(error_answer(error), error.status)
