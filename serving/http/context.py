"""The context of a request, in addition to its ASGI scope; shared by the middleware and the routes."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from starlette.requests import HTTPConnection
from starlette.types import Scope

_KEY = "openworld"
_SANE_ID = re.compile(rb"[A-Za-z0-9._:-]{1,64}")


@dataclass
class RequestContext:
    """One per request."""

    request_id: str
    user: str = ""
    """The name that the caller gave with a valid admin token."""
    error_code: str | None = None
    """The code of the error that the request is answered with."""

    @classmethod
    def attach(cls, scope: Scope) -> RequestContext:
        """Make the context of a request; its id is the caller's own if it is harmless in a log, else a random one."""
        given = (value for name, value in scope["headers"] if name == b"x-request-id")
        sane = next((value.decode("ascii") for value in given if _SANE_ID.fullmatch(value)), None)
        context = scope[_KEY] = cls(sane or os.urandom(8).hex())
        return context

    @staticmethod
    def of(request: HTTPConnection) -> RequestContext:
        context: RequestContext = request.scope[_KEY]
        return context
