"""The outermost layer of a worker: request ids, keys, headers, one shape for every error, a line a request."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Awaitable, Callable, Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.errors import MalformedRequestError, MethodError, PageError, RequestError, ServerError
from serving.logs import RequestLog
from serving.meter import Meter
from serving.onewrite import one_write
from serving.predictions import REFUSED, REQUEST_ID, Reply
from serving.schemas import SCHEMA, error_answer
from serving.security import (
    ADMIN_PATHS,
    API_HEADERS,
    KEY_PATHS,
    PAGE_HEADERS,
    USER,
    check_admin,
    check_change,
    check_key,
)
from serving.settings import Settings

PREDICTIONS = frozenset(("/predict", "/predict_many"))
PROBES = frozenset(("/livez", "/readyz", "/healthz", "/metrics"))
ADMIN = frozenset(("/admin/reload", "/admin/rollback", "/admin/status"))
CHANGES = ("/label", "/known", "/junk", "/clear", "/move", "/merge")
UNKNOWNS = frozenset(f"/unknowns{page}" for page in ("", "/groups", "/items", *CHANGES))
PAGES = PREDICTIONS | PROBES | ADMIN | UNKNOWNS | {"/", "/docs", "/docs.json", "/model", "/schema.json", "/samples"}
OTHER = "other"
"""What counts for every path that is not listed: paths are made up by callers."""

SCHEMA_HEADER = (b"x-openworld-schema", str(SCHEMA).encode())

log = logging.getLogger("bentoml.openworld")
_SANE_ID = re.compile(rb"[A-Za-z0-9._:-]{1,64}")

Handlers = Mapping[str, Callable[[Scope, Receive], Awaitable[Reply]]]


class Edge:
    """Every request passes here first, and every response last.

    `handlers` answer POST requests to their paths at once: BentoML's layers cost more than the answer itself.
    """

    def __init__(self, app: ASGIApp, settings: Settings, meter: Meter, handlers: Handlers) -> None:
        self._app = app
        self._handlers = handlers
        self._key = settings.api_key
        self._token = settings.admin_token
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
            # Frameworks take a path that ends in a line break for the one without it: to us it is no page at all.
            if not exchange.path.isprintable():
                raise _no_page(exchange.path)
            # What only begins like a page needs what the page needs, whatever the framework makes of the rest.
            if self._key is not None and exchange.path.startswith(KEY_PATHS):
                check_key(scope["headers"], self._key)
            if exchange.path.startswith(ADMIN_PATHS):
                scope[USER] = check_admin(scope["headers"], self._token)
                check_change(exchange.method, scope["headers"])
            handler = self._handlers.get(exchange.path) if exchange.method == "POST" else None
            if handler is None:
                await self._app(scope, receive, exchange.send)
            else:
                await exchange.reply(await handler(scope, receive))
        except RequestError as error:
            self._meter.rejected(error.code)
            await exchange.refuse(error)
        except Exception:
            request_id = exchange.request_id
            log.exception("request %s failed", request_id, extra={"request_id": request_id})
            if not exchange.begun:
                await exchange.refuse(ServerError("the server failed", got="an error", allowed="see its log"))
        finally:
            self._note(exchange)

    def _note(self, exchange: Exchange) -> None:
        seconds = time.perf_counter() - exchange.started
        path, status = exchange.path, exchange.status
        self._meter.request(path if path in PAGES else OTHER, status, seconds)
        if self._log is not None and (path not in PROBES or status >= 400):
            self._log.add(exchange.request_id, exchange.method, path, status, seconds, exchange.scope.get(REFUSED))


class Exchange:
    """One request and its response."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self.started = time.perf_counter()
        self.scope = scope
        self.path: str = scope["path"]
        self.method: str = scope["method"]
        self.request_id = scope[REQUEST_ID] = _request_id(scope)
        self.status = 500
        self.begun = False
        self._send = send
        self._replaced = False

    async def send(self, message: Message) -> None:
        """Pass a message on; an error that is not in our shape is replaced by one that is."""
        if message["type"] == "http.response.start":
            self.begun, self.status = True, message["status"]
            if self.status >= 400 and REFUSED not in self.scope:
                self._replaced = True
                await self.refuse(_translated(self, dict(message["headers"])), self.status)
                return
            message["headers"] = [*message["headers"], *self._headers()]
        elif self._replaced:
            return
        await self._send(message)

    async def reply(self, reply: Reply) -> None:
        """Answer with JSON."""
        self.begun, self.status = True, reply.status
        body = reply.body.encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            *self._headers(),
            *((name.encode(), value.encode()) for name, value in reply.headers.items()),
        ]
        with one_write(self._send):
            await self._send({"type": "http.response.start", "status": reply.status, "headers": headers})
            await self._send({"type": "http.response.body", "body": body})

    async def refuse(self, error: RequestError, status: int | None = None) -> None:
        """Answer with an error."""
        self.scope[REFUSED] = error.code
        body = error_answer(error, self.request_id).model_dump_json()
        await self.reply(Reply(status or error.status, body, error.headers))

    def _headers(self) -> list[tuple[bytes, bytes]]:
        added = API_HEADERS if self.path in PREDICTIONS else PAGE_HEADERS
        return [(b"x-request-id", self.request_id.encode()), SCHEMA_HEADER, *added]


def _request_id(scope: Scope) -> str:
    """The caller's own, if it is harmless in a log, else a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _SANE_ID.fullmatch(value):
            return str(value, "ascii")
    return os.urandom(8).hex()


def _no_page(path: str) -> PageError:
    return PageError("no such page", got=path, allowed="what /docs.json lists")


def _translated(exchange: Exchange, headers: dict[bytes, bytes]) -> RequestError:
    """What the framework meant, in our words."""
    if exchange.status == 404:
        return _no_page(exchange.path)
    if exchange.status == 405:
        allowed = headers.get(b"allow", b"").decode()
        return MethodError("the page takes another method", got=exchange.method, allowed=allowed)
    if exchange.status < 500:
        got = f"{exchange.method} {exchange.path}"
        return MalformedRequestError("request refused", got=got, allowed="what /docs.json lists")
    return ServerError("the server failed", got=f"status {exchange.status}", allowed="see its log")
