"""How bytes become requests: uvicorn's way, with bounds before a request is one, and after it was answered.

uvicorn takes a head of any length, waits for it for ever, reads on for as long as a client sends what nobody wants any
more, and takes the body of a request that offers another protocol for the next request. Reaches into uvicorn, whose
version is pinned.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from serving.edge import SCHEMA_HEADER
from serving.errors import HeadTooLargeError, MalformedRequestError, RequestError
from serving.schemas import error_answer

LARGEST_HEAD = 64 * 1024
"""Bytes of a request's first line and headers."""
SLOWEST_HEAD = 10.0
"""Seconds from the connection, or the first byte of a further request, to the end of its head."""
MOST_UNWANTED, SLOWEST_UNWANTED = 64 * 1024 * 1024, 30.0
"""Bytes and seconds of a body that is still sent after the answer: a client that is cut off may not read that."""
FAREWELL = 1.0
"""Seconds for a client to read why it is cut off."""


class BoundedProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._in_head = True
        self._head_size = 0
        self._unwanted = 0
        self._refused = False
        self._overdue: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect(SLOWEST_HEAD)

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_nothing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        while data and not self._refused:
            room = LARGEST_HEAD - self._head_size if self._in_head else len(data)
            piece, data = data[:room], data[room:]
            if self._in_head:
                self._head_size += len(piece)
            self._feed(piece)
            if self._in_head and self._head_size >= LARGEST_HEAD:
                got = f"at least {self._head_size} bytes"
                self._refuse(HeadTooLargeError("head too large", got=got, allowed=f"less than {LARGEST_HEAD} bytes"))
        if not self._refused and (self.cycle is None or self.cycle.response_complete):
            self._wait_for_more()

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            # What was offered is left alone, and the request comes again without it.
            return
        self._in_head = False
        self._expect_nothing()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self.cycle.response_complete:
            super().on_body(body)
            return
        self._unwanted += len(body)
        if self._unwanted > MOST_UNWANTED:
            self.transport.close()

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        self._in_head, self._head_size, self._unwanted = True, 0, 0
        self._expect_nothing()

    def send_400_response(self, msg: str) -> None:
        self._refuse(MalformedRequestError("request cannot be read", got=msg, allowed="HTTP/1.1"))

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._read_on(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            self.send_400_response(type(error).__name__)

    def _read_on(self, rest: bytes) -> None:
        """Read a request that offers another protocol as if it had not: the parser takes its body for that protocol."""
        headers = [(name, value) for name, value in self.headers if name != b"upgrade"]
        method = self.parser.get_method()
        if len(headers) == len(self.headers):
            self.send_400_response(method.decode())
            return
        lines = [b"%b %b HTTP/%b" % (method, self.url, self.parser.get_http_version().encode())]
        lines += [b"%b: %b" % header for header in headers]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._feed(b"\r\n".join([*lines, b"", b""]))
        if not self._refused:
            self._feed(rest)

    def _wait_for_more(self) -> None:
        """Nobody waits for an answer: what the client owes us has to come, and else the connection is idle."""
        if not self._in_head:
            self._expect(SLOWEST_UNWANTED)
        elif self._head_size:
            self._expect(SLOWEST_HEAD)
        elif not self.transport.is_closing():
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _expect(self, seconds: float) -> None:
        # A client that sends a byte now and then has no more time than others.
        if self._overdue is None:
            self._overdue = self.loop.call_later(seconds, self._give_up)

    def _expect_nothing(self) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None

    def _give_up(self) -> None:
        self._overdue = None
        self.transport.close()

    def _refuse(self, error: RequestError) -> None:
        """Say what is wrong, in the shape that every error has, and let go of the client once it can have read it."""
        self._refused = True
        self.logger.warning("connection refused: %s", error)
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        body = error_answer(error).model_dump_json().encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
            SCHEMA_HEADER,
        ]
        self.transport.write(
            STATUS_LINE[error.status] + b"".join(b"%b: %b\r\n" % header for header in headers) + b"\r\n" + body
        )
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._expect_nothing()
        self._expect(FAREWELL)
