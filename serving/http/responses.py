"""Error responses, in one shape for all routes."""

from __future__ import annotations

import json

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from serving import errors
from serving.http.context import RequestContext
from serving.http.schemas import error_answer
from serving.telemetry import metrics

DOCUMENT = "what /docs.json describes"


PROTOCOL_PATHS = "/v2"
"""Paths that begin so are those of the Open Inference Protocol, whose errors are one text."""


def error_response(error: errors.RequestError, context: RequestContext, path: str) -> Response:
    """The response for an error at a path; it is counted and noted for the log."""
    metrics.REJECTED.labels(error.code).inc()
    context.error_code = error.code
    if path.startswith(PROTOCOL_PATHS):
        body = json.dumps({"error": str(error)})
    else:
        body = error_answer(error, context.request_id).model_dump_json()
    return Response(body, error.status, error.headers, media_type="application/json")


async def handle_http_exception(request: Request, error: Exception) -> Response:
    """The response for an error that a route or the framework raised."""
    assert isinstance(error, HTTPException)
    found = _as_request_error(request, error).without_traceback()
    return error_response(found, RequestContext.of(request), request.url.path)


async def handle_validation_error(request: Request, error: Exception) -> Response:
    """The response for a body or a parameter that does not fit the types of a route."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place, *inner = first["loc"]
    name = " ".join(map(str, inner))
    invalid: errors.RequestError
    if place == "body":
        got = f"{first['msg']} {name}".strip()
        invalid = errors.MalformedRequestError("JSON body cannot be read", got=got, allowed=DOCUMENT)
    elif place == "path":
        invalid = errors.NoSuchItemError("not in the quarantine", got=f"no {name} {first['input']}", allowed="a number")
    else:
        got = name if first["type"] in ("missing", "extra_forbidden") else f"{name}={first['input']}"
        invalid = errors.ParameterError("parameter cannot be used", got=got, allowed=first["msg"])
    return error_response(invalid, RequestContext.of(request), request.url.path)


def no_such_page(path: str, allowed: str = DOCUMENT) -> errors.PageError:
    return errors.PageError("no such page", got=path, allowed=allowed)


def _as_request_error(request: Request, error: HTTPException) -> errors.RequestError:
    if isinstance(error, errors.RequestError):
        return error
    if error.status_code == 404:
        return no_such_page(request.url.path)
    if error.status_code == 405:
        methods = (error.headers or {}).get("Allow", "").split(", ")
        # A GET route answers HEAD, too.
        allowed = ", ".join([*methods, "HEAD"] if "GET" in methods else methods)
        return errors.MethodError(
            "the page takes another method", got=request.method, allowed=allowed, headers={"allow": allowed}
        )
    if error.status_code < 500:
        return errors.MalformedRequestError("request refused", got=str(error.detail), allowed=DOCUMENT)
    return errors.ServerError("the server failed", got=f"status {error.status_code}", allowed="see its log")
