"""The server: bentoml serve serving.service:OpenWorld

The command that starts workers imports this, and a server is ready only after it did: what workers alone need is
imported by them (`serving.app`).
"""

from __future__ import annotations

import os
import sys

import bentoml
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from serving.bento import LeanService, WholeRequest, home, start_lean_workers
from serving.group import VARIABLE as GROUP_VARIABLE
from serving.layout import BundleError
from serving.logs import log_as
from serving.machine import available_cpus, plan
from serving.preflight import CANNOT_SERVE, check_in_child, first_bundle, found_group
from serving.schemas import Answer, Answers
from serving.settings import PREFIX, Settings, SettingsError


def _settings() -> Settings:
    try:
        return Settings.from_environment()
    except SettingsError:
        # The deployment hook says so and stops the server: to import a module does not end a process.
        return Settings()


class _Service(LeanService):
    def pages(self) -> ASGIApp:
        from serving.app import pages

        return pages

    def around(self, app: ASGIApp) -> ASGIApp:
        from serving.app import around

        return around(app)


@bentoml.service(
    name="openworld",
    service_class=_Service,
    workers=plan(_settings(), available_cpus()).workers,
    metrics={"enabled": False},
    logging={"access": {"enabled": False}},
    tracing={"excluded_urls": "livez,readyz,healthz,metrics"},
)
class OpenWorld:
    """Tells what an image shows, or that it shows nothing that was taught."""

    @bentoml.on_deployment
    @staticmethod
    def refuse_what_cannot_be_served() -> None:
        try:
            settings = Settings.from_environment()
        except SettingsError as error:
            print(error, file=sys.stderr)
            sys.exit(CANNOT_SERVE)
        log_as(settings.log)
        start_lean_workers()
        # The workers inherit it, and may run in another directory.
        if settings.bundles is None:
            os.environ["OPENWORLD_BUNDLE"] = str(settings.bundle)
        else:
            os.environ["OPENWORLD_BUNDLES"] = str(settings.bundles)
        for name in ("quarantine_url", "quarantine_images"):
            if value := getattr(settings, name):
                os.environ[PREFIX + name.upper()] = value
        try:
            bundle = first_bundle(settings)
            if code := check_in_child(settings, bundle):
                sys.exit(code)
            if settings.swappable:
                os.environ[GROUP_VARIABLE] = str(found_group(settings, bundle, home()).folder)
        except BundleError as error:
            print(error, file=sys.stderr)
            sys.exit(CANNOT_SERVE)

    def __init__(self) -> None:
        from serving.app import started_engine

        self.engine = started_engine()

    @bentoml.on_shutdown
    def close(self) -> None:
        self.engine.close()

    # BentoML shows these to its own clients, and calls them when it traces; else the layer around it answers first.
    @bentoml.api(input_spec=WholeRequest, output_spec=Answer)
    async def predict(self, request: Request) -> Response:
        """Say what an image shows, or that it is unknown."""
        reply = await self.engine.predictions.one(request.scope, request.receive)
        return Response(reply.body, reply.status, reply.headers, media_type="application/json")

    @bentoml.api(input_spec=WholeRequest, output_spec=Answers)
    async def predict_many(self, request: Request) -> Response:
        """Say what each of several images shows; a bad one spoils only its own answer."""
        reply = await self.engine.predictions.many(request.scope, request.receive)
        return Response(reply.body, reply.status, reply.headers, media_type="application/json")
