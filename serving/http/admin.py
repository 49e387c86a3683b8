"""The routes for operators of a running server; the middleware checks the admin token before."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response

from serving import errors
from serving.http.context import RequestContext
from serving.http.guards import Guard, GuardedRouter
from serving.http.openapi import error_responses
from serving.http.schemas import ServerStatus, SwapAnswer, WorkerStatus
from serving.swap.leader import SwapLeader, SwapOutcome
from serving.telemetry import log

MIN_DEADLINE = 30.0
"""Seconds that a request for a swap may take at least, however short the deadline of predictions is."""

_SWAP_ERRORS = (errors.SwapError, errors.MediaTypeError, errors.BundleRefusedError, errors.DeadlineError)

router = GuardedRouter(Guard.ADMIN, prefix="/admin", tags=["Administration"])


@router.post("/reload", response_model=SwapAnswer, responses=error_responses(*_SWAP_ERRORS))
async def reload(request: Request) -> Response:
    """Serve the bundle that is there now."""
    log.info("%s asks for a reload", RequestContext.of(request).user)
    return await _finished(request, _swaps(request).reload())


@router.post("/rollback", response_model=SwapAnswer, responses=error_responses(*_SWAP_ERRORS))
async def rollback(request: Request) -> Response:
    """Serve the bundle that was served before."""
    log.info("%s asks for a rollback", RequestContext.of(request).user)
    return await _finished(request, _swaps(request).roll_back())


@router.get("/status", response_model=ServerStatus)
async def status(request: Request) -> Response:
    """What every worker serves."""
    outcome = await asyncio.to_thread(_swaps(request).status)
    return _json(ServerStatus(**_fields(outcome)))


def _swaps(request: Request) -> SwapLeader:
    # A server with an admin token can always swap.
    return cast(SwapLeader, request.app.state.engine().swaps)


async def _finished(request: Request, swap: Future[SwapOutcome]) -> Response:
    """The response to a swap; one that takes longer than a request may goes on without it."""
    seconds = max(MIN_DEADLINE, request.app.state.settings.deadline)
    try:
        # Shielded, because a swap must not be cancelled half-way.
        outcome = await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(swap)), seconds)
    except TimeoutError:
        got = f"a swap of more than {seconds:g} seconds"
        raise errors.DeadlineError("the swap is still running", got=got, allowed="poll /admin/status") from None
    return _json(SwapAnswer(changed=outcome.changed, **_fields(outcome)))


def _fields(outcome: SwapOutcome) -> dict[str, Any]:
    state = outcome.state
    return {
        "version": state.serving.version,
        "previous": None if state.previous is None else state.previous.version,
        "refused": None if state.refused is None else state.refused.reason,
        "workers": [WorkerStatus.model_validate(worker.model_dump(), extra="ignore") for worker in outcome.workers],
    }


def _json(answer: ServerStatus) -> Response:
    return Response(answer.model_dump_json(), media_type="application/json", headers={"cache-control": "no-store"})
