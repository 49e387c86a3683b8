"""The outermost layer of the web application: request ids, authorisation, headers, limits, log and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from urllib.parse import unquote_plus

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.errors import (
    DeadlineError,
    MalformedRequestError,
    ParameterError,
    RequestError,
    ServerError,
    TooManyBytesError,
)
from serving.http.auth import (
    API_HEADERS,
    PAGE_HEADERS,
    TEACH_UPLOADS,
    check_admin,
    check_change,
    check_key,
)
from serving.http.context import RequestContext
from serving.http.guards import GuardedPaths
from serving.http.responses import error_response, no_such_page
from serving.http.schemas import SCHEMA
from serving.settings import Settings
from serving.telemetry import log
from serving.telemetry.logs import RequestLog
from serving.telemetry.metrics import LATENCY, REQUESTS

PROBES = frozenset(("/livez", "/readyz", "/healthz", "/metrics"))
"""Successful requests to these are not logged."""
OTHER = "other"
"""The metrics' label for every path that is not a route: paths are made up by callers."""
MAX_JSON_BYTES, MAX_JSON_PARTS = 1024 * 1024, 100_016
"""Bounds of a body that the framework parses: each small JSON value takes many times its size once it is parsed."""

SCHEMA_HEADER = (b"x-openworld-schema", str(SCHEMA).encode())


class RequestMiddleware:
    """Every request passes here first, and every response last."""

    def __init__(self, app: ASGIApp, settings: Settings, routers: Sequence[APIRouter]) -> None:
        """`routers` have the routes of the application, and declare which are guarded."""
        self._app = app
        self._key = settings.api_key
        self._token = settings.admin_token
        self._tracing = settings.tracing
        self._deadline = settings.deadline
        self._guarded = GuardedPaths.of(routers)
        self._endpoints = {route.path for router in routers for route in router.routes if isinstance(route, APIRoute)}
        self._log = RequestLog(settings.log) if settings.access_log else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            # There are no WebSockets; the application refuses them.
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        context = RequestContext.attach(scope)
        body = _RequestBody(scope, receive, self._deadline)
        path: str = scope["path"]
        # Whatever starts like a guarded path is guarded, however the framework reads the rest.
        predicts = path.startswith(self._guarded.key)
        headers = [*(_trace_header() if self._tracing else ()), *(API_HEADERS if predicts else PAGE_HEADERS)]
        response = _ResponseSender(scope, send, headers, context, body)
        try:
            self._check(scope, context)
            # Predictions and these uploads are read by their routes, within limits of their own.
            reads_own_body = predicts or path in TEACH_UPLOADS
            bounded = body.receive if reads_own_body else _bounded(body.receive, self._deadline)
            # A GET route answers HEAD, too; the body is left out.
            inner = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
            await self._app(inner, bounded, response.send)
        except RequestError as error:
            await error_response(error, context, scope["path"])(scope, receive, response.send)
        except Exception:
            log.exception("request %s failed", context.request_id, extra={"request_id": context.request_id})
            if not response.started:
                failed = ServerError("the server failed", got="an error", allowed="see its log")
                await error_response(failed, context, scope["path"])(scope, receive, response.send)
        finally:
            self._record(scope, context, response.status, time.perf_counter() - started)

    def _check(self, scope: Scope, context: RequestContext) -> None:
        """Refuse what may not reach a route."""
        path, headers = scope["path"], scope["headers"]
        # Some frameworks match a path that ends in a line break with the route without it.
        if not path.isprintable():
            raise no_such_page(path)
        # Protected paths are matched by prefix, however the router normalises the rest.
        if self._key is not None and path.startswith(self._guarded.key):
            check_key(headers, self._key)
        if path.startswith(self._guarded.admin):
            context.user = check_admin(headers, self._token)
            check_change(scope["method"], path, headers)
        _check_parameters(scope["query_string"])

    def _record(self, scope: Scope, context: RequestContext, status: int, seconds: float) -> None:
        path = scope["path"]
        # Requests to a route with path parameters are counted under its pattern.
        pattern = getattr(scope.get("route"), "path", path)
        endpoint = pattern if pattern in self._endpoints else OTHER
        REQUESTS.labels(endpoint, status).inc()
        LATENCY.labels(endpoint).observe(seconds)
        if self._log is not None and (path not in PROBES or status >= 400):
            self._log.write(context.request_id, scope["method"], path, status, seconds, context.error_code)


class _RequestBody:
    """Notes whether the body of a request was received to its end, and can discard the rest until the deadline."""

    def __init__(self, scope: Scope, receive: Receive, seconds: float) -> None:
        headers = dict(scope["headers"])
        self.complete = headers.get(b"content-length", b"0") == b"0" and b"transfer-encoding" not in headers
        self._receive = receive
        self._until = asyncio.get_running_loop().time() + seconds

    async def receive(self) -> Message:
        message = await self._receive()
        # The last part of the body, or the end of the connection.
        self.complete = self.complete or not message.get("more_body", False)
        return message

    async def discard(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(self._until):
                while not self.complete:
                    await self.receive()


class _ResponseSender:
    """Adds the headers that every response has, and remembers the status.

    If a request is answered before its body has ended, such as one that is too large, the connection is closed after
    the response. It stays open until the body has ended or the deadline has passed: a client that meets a closed
    connection while it sends may lose the response.
    """

    def __init__(
        self,
        scope: Scope,
        send: Send,
        more: list[tuple[bytes, bytes]],
        context: RequestContext,
        body: _RequestBody,
    ) -> None:
        self.status = 500
        self.started = False
        self._closes = False
        self._body = body
        self._bodyless = scope["method"] == "HEAD"
        self._send = send
        request_id = (b"x-request-id", context.request_id.encode())
        self._headers = [request_id, SCHEMA_HEADER, *more]

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started, self.status = True, message["status"]
            self._closes = not self._body.complete
            close = [(b"connection", b"close")] if self._closes else []
            message["headers"] = [*message["headers"], *self._headers, *close]
        elif self._bodyless and message["type"] == "http.response.body":
            message["body"] = b""
        if self._closes and message["type"] == "http.response.body" and not message.get("more_body", False):
            await self._send({**message, "more_body": True})
            await self._body.discard()
            message = {"type": "http.response.body"}
        await self._send(message)


def _trace_header() -> Iterator[tuple[bytes, bytes]]:
    """The id of the trace that BentoML's OpenTelemetry middleware began or continued for this request."""
    from opentelemetry import trace

    if (span := trace.get_current_span().get_span_context()).is_valid:
        yield b"x-trace-id", trace.format_trace_id(span.trace_id).encode()


def _check_parameters(query: bytes) -> None:
    """Refuse a parameter that is given twice, of which the framework would ignore one."""
    if b"&" in query:
        # As the framework decodes them: "%74op" is "top".
        names = Counter(unquote_plus(part.partition("=")[0]) for part in query.decode("latin-1").split("&"))
        (name, count) = names.most_common(1)[0]
        if count > 1:
            raise ParameterError("parameter given twice", got=name, allowed="each parameter once")


def _bounded(receive: Receive, seconds: float) -> Receive:
    """Receive a body of a bounded number of bytes and JSON values, within a number of seconds from now."""
    size = parts = 0
    until = asyncio.get_running_loop().time() + seconds
    complete = False

    async def bounded() -> Message:
        nonlocal size, parts, complete
        if complete:
            # There is no deadline once the body is complete: the client may keep the connection open.
            return await receive()
        try:
            async with asyncio.timeout_at(until):
                message = await receive()
        except TimeoutError:
            allowed = f"{seconds:g} seconds from the request's head to the end of its body"
            raise DeadlineError("the deadline passed", got=f"{size} bytes of a body", allowed=allowed) from None
        complete = not message.get("more_body", False)
        chunk = message.get("body", b"")
        size += len(chunk)
        parts += chunk.count(b",") + chunk.count(b"[") + chunk.count(b"{")
        if size > MAX_JSON_BYTES:
            raise TooManyBytesError(
                "body too large", got=f"at least {size} bytes", allowed=f"up to {MAX_JSON_BYTES} bytes"
            )
        if parts > MAX_JSON_PARTS:
            got = f"at least {parts} commas and opening brackets"
            raise MalformedRequestError("JSON body has too many parts", got=got, allowed=f"up to {MAX_JSON_PARTS}")
        return message

    return bounded
