"""What an operator may ask of a running server; who may is checked before a request comes here.

POST /admin/reload     take the bundle that the shelf or the path holds now
POST /admin/rollback   take the one that was served before
GET  /admin/status     what every worker serves
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from serving.schemas import ServerStatus, SwapAnswer, WorkerStatus
from serving.security import USER
from serving.swap import Outcome, Swaps

log = logging.getLogger("bentoml.openworld")


async def _reload(request: Request) -> Response:
    log.info("%s asks for a reload", request.scope[USER])
    return _swapped(await asyncio.wrap_future(_swaps(request).reload()))


async def _roll_back(request: Request) -> Response:
    log.info("%s asks for a rollback", request.scope[USER])
    return _swapped(await asyncio.wrap_future(_swaps(request).roll_back()))


async def _status(request: Request) -> Response:
    outcome = await asyncio.to_thread(_swaps(request).status)
    return _json(ServerStatus(**_said(outcome)))


def _swaps(request: Request) -> Swaps:
    return cast(Swaps, request.app.state.swaps)


def _swapped(outcome: Outcome) -> Response:
    return _json(SwapAnswer(changed=outcome.changed, **_said(outcome)))


def _said(outcome: Outcome) -> dict[str, Any]:
    state = outcome.state
    return {
        "version": state.serving.version,
        "previous": None if state.previous is None else state.previous.version,
        "refused": None if state.refused is None else state.refused.reason,
        "workers": tuple(
            WorkerStatus(pid=worker.pid, version=worker.version, previous=worker.previous, error=worker.error)
            for worker in outcome.workers
        ),
    }


def _json(answer: ServerStatus) -> Response:
    return Response(answer.model_dump_json(), media_type="application/json", headers={"cache-control": "no-store"})


routes = [
    Route("/admin/reload", _reload, methods=["POST"]),
    Route("/admin/rollback", _roll_back, methods=["POST"]),
    Route("/admin/status", _status),
]
