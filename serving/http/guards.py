"""Which routes need the API key or the admin token: their router declares it, and all else is derived from that."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Any, NamedTuple

from fastapi import APIRouter
from fastapi.routing import APIRoute

from serving.errors import AdminOffError, AdminTokenError, CrossSiteError, RequestError, UnauthorizedError
from serving.http.openapi import error_responses


class Guard(Enum):
    """What a request needs, and the errors of one that does not have it."""

    KEY = (UnauthorizedError,)
    """The API key, if the server has one."""
    ADMIN = (AdminTokenError, AdminOffError, CrossSiteError)
    """The admin token, and for a change the same site."""


class GuardedRouter(APIRouter):
    """A router whose paths are guarded, as is every path that starts like one of them, whether it is a route or not."""

    def __init__(self, guard: Guard, *errors: type[RequestError], **options: Any) -> None:
        """`errors` are further errors of all routes; other options are those of an APIRouter."""
        super().__init__(**{"responses": error_responses(*guard.value, *errors), **options})
        self.guard = guard

    @property
    def starts(self) -> tuple[str, ...]:
        """How its paths start: with its prefix, or without one as its routes do, up to their parameters."""
        if self.prefix:
            return (self.prefix,)
        paths = {route.path.partition("{")[0].rstrip("/") for route in self.routes if isinstance(route, APIRoute)}
        return tuple(sorted(paths))


class GuardedPaths(NamedTuple):
    """How the paths start that need the API key, and those that need the admin token."""

    key: tuple[str, ...]
    admin: tuple[str, ...]

    @classmethod
    def of(cls, routers: Iterable[APIRouter]) -> GuardedPaths:
        guarded = [router for router in routers if isinstance(router, GuardedRouter)]
        key, admin = (
            tuple(start for router in guarded if router.guard is guard for start in router.starts)
            for guard in (Guard.KEY, Guard.ADMIN)
        )
        return cls(key, admin)
