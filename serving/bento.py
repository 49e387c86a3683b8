"""How we differ from a BentoML service out of the box. Reaches into its private modules: the version is pinned."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import Any

import click
from _bentoml_sdk import IODescriptor, Service
from _bentoml_sdk.service import set_current_service
from bentoml._internal.configuration.containers import BentoMLContainer
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp

from serving.late import import_late
from serving.listen import listen_alone
from serving.memory import ask_for_large_pages
from serving.settings import HOME, Settings

log = logging.getLogger("bentoml.openworld")


def home() -> Path:
    """BENTOML_HOME, which a server may write to."""
    return Path(BentoMLContainer.bentoml_home.get())


def start_lean_workers() -> None:
    """Let the server of this process start `serving.worker` for each of its workers."""
    from _bentoml_impl.server import serving

    serving._SERVICE_WORKER_SCRIPT = f"{__package__}.worker"
    ask_for_large_pages(os.environ)
    # A worker starts in another folder where the service comes from a built bento.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HOME), os.environ.get("PYTHONPATH"))))


class ListenError(Exception):
    """A server cannot have the address that it was given."""


def serve(service: Service[Any], host: str | None, port: int | None) -> None:
    """What `bentoml serve` does, without the rest of its command line, which takes longer to import than to run."""
    from _bentoml_impl.server.serving import serve_http
    from bentoml._internal.log import configure_server_logging

    configure_server_logging()  # type: ignore[no-untyped-call]
    service.inject_config()
    host, port = host or BentoMLContainer.http.host.get(), port or BentoMLContainer.http.port.get()
    try:
        serve_http(service, host=host, port=port)
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES):
            raise
        raise ListenError(
            f"{host}:{port}: cannot listen there: {os.strerror(error.errno)}; allowed: an address of this machine and "
            "a free port (--host, --port)"
        ) from error


class WholeRequest(IODescriptor):
    """The request as it came."""

    # BentoML's own reading of images has no limits, follows URLs and turns a bad image into a 500.
    __root_input__ = True

    image: str

    @classmethod
    async def from_http_request(cls, request: Request, serde: Any) -> Request:
        return request


class LeanService(Service):
    """A BentoML service inside a layer of our own, which does what BentoML's would do at several times the cost."""

    def pages(self) -> ASGIApp:
        """What answers beside the service's own methods; asked for by workers."""
        raise NotImplementedError

    def around(self, app: ASGIApp) -> ASGIApp:
        """The service in its layer; asked for by workers."""
        raise NotImplementedError

    def to_asgi(self, is_main: bool = True) -> ASGIApp:
        context = click.get_current_context(silent=True)
        if context is not None and "fd" in context.params:
            listen_alone(context.params["fd"])
        self.inject_config()
        self.mount_asgi_app(self.pages())
        factory = _lean_factory(traced=Settings.from_environment().tracing)(self, is_main=is_main)
        # Its timer is never cancelled, and lives on for a minute after each request.
        factory.timeout = None
        app = factory()
        # As for our own pages.
        app.router.redirect_slashes = False
        return self.around(app)


def _lean_factory(*, traced: bool) -> type[Any]:
    """BentoML's, without what only services need that call others: to import that takes as long as all of ours."""
    import_late("aiohttp")
    import_late("_bentoml_impl.server.proxy", "create_proxy_app")
    # Only a worker needs it.
    from _bentoml_impl.server.app import ContextMiddleware, ServiceAppFactory
    from bentoml._internal.server.base_app import BaseAppFactory

    class LeanFactory(ServiceAppFactory):
        # BentoML's looks at the services that ours depends on: there are none.
        readyz = BaseAppFactory.readyz

        @property
        def middlewares(self) -> list[Middleware]:
            if traced:
                return list(super().middlewares)
            # To import OpenTelemetry takes long; the rest of BentoML's layers is off, or done by ours.
            shared = [Middleware(CORSMiddleware, **self.access_control_options)] if self.enable_access_control else []
            return [*shared, Middleware(ContextMiddleware, context=self.service.context)]

        async def create_instance(self, app: ASGIApp) -> None:
            # BentoML's adds a client through which the service could call itself.
            self._service_instance = self.service()
            set_current_service(self._service_instance)
            log.info("Service %s initialized", self.service.name)

    return LeanFactory
