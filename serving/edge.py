"""The outermost layer of a worker: request ids, the API key, headers, one shape for every error, a line a request."""

from __future__ import annotations

import os
import re
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.errors import MalformedRequestError, MethodError, PageError, RequestError, ServerError
from serving.logs import RequestLog
from serving.meter import Meter
from serving.schemas import SCHEMA, error_answer
from serving.security import API_HEADERS, PAGE_HEADERS, check_key
from serving.settings import Settings

PREDICTIONS = frozenset(("/predict", "/predict_many"))
PROBES = frozenset(("/livez", "/readyz", "/healthz", "/metrics"))
PAGES = PREDICTIONS | PROBES | {"/", "/docs", "/docs.json", "/model", "/schema.json", "/samples"}
OTHER = "other"
"""What counts for every path that is not listed: paths are made up by callers."""

SCHEMA_HEADER = (b"x-openworld-schema", str(SCHEMA).encode())
REQUEST_ID = "openworld_request_id"
REFUSED = "openworld_refused"
"""Where a scope holds its id, and the code of the error that answers it."""

_SANE_ID = re.compile(rb"[A-Za-z0-9._:-]{1,64}")


class Edge:
    """Every request passes here first, and every response last."""

    def __init__(self, app: ASGIApp, settings: Settings, meter: Meter) -> None:
        self._app = app
        self._key = settings.api_key
        self._meter = meter
        self._log = RequestLog(settings.log) if settings.access_log else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            if self._log is not None:
                self._log.write()
            return
        exchange = Exchange(scope, send)
        try:
            if self._key is not None and exchange.path in PREDICTIONS:
                check_key(scope["headers"], self._key)
            await self._app(scope, receive, exchange.send)
        except RequestError as error:
            self._meter.rejected(error.code)
            await exchange.refuse(error)
        finally:
            self._note(exchange)

    def _note(self, exchange: Exchange) -> None:
        seconds = time.perf_counter() - exchange.started
        path, status = exchange.path, exchange.status
        self._meter.request(path if path in PAGES else OTHER, status, seconds)
        if self._log is not None and (path not in PROBES or status >= 400):
            self._log.add(
                request_id=exchange.request_id,
                method=exchange.method,
                path=path,
                status=status,
                seconds=seconds,
                error=exchange.scope.get(REFUSED),
            )


class Exchange:
    """One request and its response."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self.started = time.perf_counter()
        self.path: str = scope["path"]
        self.method: str = scope["method"]
        self.request_id = scope[REQUEST_ID] = _request_id(scope)
        self.status = 500
        self.scope = scope
        self._send = send
        self._replaced = False

    async def send(self, message: Message) -> None:
        """Pass a message on; an error that is not in our shape is replaced by one that is."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            ours = SCHEMA_HEADER in message["headers"]
            if self.status >= 400 and not ours:
                self._replaced = True
                await self.refuse(_translated(self, dict(message["headers"])), self.status)
                return
            message["headers"] = [*message["headers"], *self._headers(ours)]
        elif self._replaced:
            return
        await self._send(message)

    async def refuse(self, error: RequestError, status: int | None = None) -> None:
        """Answer with an error."""
        self.status, self.scope[REFUSED] = status or error.status, error.code
        body = error_answer(error, self.request_id).model_dump_json().encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            *((name.encode(), value.encode()) for name, value in error.headers.items()),
            *self._headers(False),
        ]
        await self._send({"type": "http.response.start", "status": self.status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    def _headers(self, ours: bool) -> list[tuple[bytes, bytes]]:
        added = API_HEADERS if self.path in PREDICTIONS else PAGE_HEADERS
        identity = (b"x-request-id", self.request_id.encode())
        return [identity, *added] if ours else [identity, SCHEMA_HEADER, *added]


def _request_id(scope: Scope) -> str:
    """The caller's own, if it is harmless in a log, else a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _SANE_ID.fullmatch(value):
            return str(value, "ascii")
    return os.urandom(8).hex()


def _translated(exchange: Exchange, headers: dict[bytes, bytes]) -> RequestError:
    """What the framework meant, in our words."""
    if exchange.status == 404:
        return PageError("no such page", got=exchange.path, allowed="what /docs.json lists")
    if exchange.status == 405:
        allowed = headers.get(b"allow", b"another method").decode()
        return MethodError("the page takes another method", got=exchange.method, allowed=allowed)
    if exchange.status < 500:
        return MalformedRequestError(
            "request refused", got=f"{exchange.method} {exchange.path}", allowed="see /docs.json"
        )
    return ServerError("the server failed", got=f"status {exchange.status}", allowed="see its log")
