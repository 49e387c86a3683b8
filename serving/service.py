"""The BentoML service: `bentoml serve serving.service:OpenWorld`, or `python -m serving`.

The process that supervises the workers imports this module, too. What only workers need is imported by them.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Annotated

import bentoml
from bentoml.validators import ContentType
from starlette.types import ASGIApp, Receive, Scope, Send

from serving.bundle.errors import BundleError
from serving.bundle.terminal import escaped
from serving.errors import RequestError
from serving.host.address import is_loopback
from serving.host.cpus import available_cpus, plan_cpus
from serving.host.memory import request_large_pages
from serving.host.preflight import CANNOT_SERVE, check_in_child, create_group, first_bundle
from serving.host.supervisor import end_with
from serving.http.schemas import Answer, Answers, error_answer
from serving.settings import BentoMLSettings, Settings, SettingsError, WorkerSettings, variable
from serving.telemetry import log
from serving.telemetry.logs import configure_logging

MIN_TIMEOUT, MARGIN = 30, 5
"""Seconds. BentoML's own timeout comes after every deadline of ours. It keeps a timer in memory for each request until
it has passed, so it should not be longer than needed."""

ImageFile = Annotated[Path, ContentType("image/*")]


def _settings() -> Settings:
    try:
        return Settings.from_environment()
    except SettingsError:
        # Importing a module must not end the process: the deployment hook reports the error and stops the server.
        return Settings()


@bentoml.service(
    name="openworld",
    workers=plan_cpus(_settings(), available_cpus()).workers,
    http={"host": BentoMLSettings.from_environment().address(_settings().api_key)},
    traffic={"timeout": max(MIN_TIMEOUT, _settings().deadline) + MARGIN},
    # The web application has metrics and a log of its own.
    metrics={"enabled": False},
    logging={"access": {"enabled": False}},
    tracing={"excluded_urls": "livez,readyz,healthz,metrics" if _settings().tracing else "."},
)
class OpenWorld:
    """Classifies images, or reports that they belong to none of its classes."""

    @bentoml.on_deployment
    @staticmethod
    def prepare() -> None:
        """Check everything that could stop a worker before a port is opened; runs in the supervisor."""
        try:
            settings = Settings.from_environment()
            configure_logging(settings.log)
            _set_environment(settings)
            os.environ[variable("supervisor")] = str(os.getpid())
            bundle = first_bundle(settings)
            if code := check_in_child(bundle):
                sys.exit(code)
            if settings.swappable:
                home = BentoMLSettings.from_environment().home
                os.environ[variable("group")] = str(create_group(settings, bundle, home).folder)
        except (SettingsError, BundleError) as error:
            print(f"error: {escaped(error)}", file=sys.stderr)
            sys.exit(CANNOT_SERVE)
        host = BentoMLSettings.from_environment().address(settings.api_key)
        if settings.api_key is None and not is_loopback(host):
            log.warning("no API key (OPENWORLD_API_KEY): everyone who can reach %s can request predictions", host)
        if importlib.util.find_spec("httptools") is not None:
            log.warning(
                "httptools is installed and used by uvicorn; uninstall it: it does not limit headers and trailers"
            )

    def __init__(self) -> None:
        from serving.http.predict_routes import Predictions
        from serving.inference.engine import Engine

        settings = Settings.from_environment()
        self.engine = Engine(settings)
        self.engine.start()
        self.predictions = Predictions(settings, lambda: self.engine.queue)
        if supervisor := WorkerSettings.from_environment().supervisor:
            end_with(supervisor)

    @bentoml.on_shutdown
    def close(self) -> None:
        self.engine.close()

    # BentoML describes these two methods to its clients. Over HTTP, `Frontend` answers instead; both go through
    # `Predictions`, with the same limits and the same deadline.
    @bentoml.api
    async def predict(self, image: ImageFile) -> Answer:
        """Classify an image, or report that it is unknown."""
        return Answer.model_validate_json(await self.predictions.file(image))

    @bentoml.api
    async def predict_many(self, images: list[Path]) -> Answers:
        """Classify several images; an invalid image yields an error in its own place."""
        return Answers(
            answers=tuple(
                error_answer(outcome) if isinstance(outcome, RequestError) else Answer.model_validate_json(outcome)
                for outcome in await self.predictions.files(images)
            )
        )


class Frontend:
    """ASGI middleware that answers every request; BentoML only gets start-up, shutdown and a few GET requests."""

    def __init__(self, app: ASGIApp) -> None:
        from serving.http.app import make_app

        settings = Settings.from_environment()
        configure_logging(settings.log)
        self._bentoml = app
        self._app = make_app(settings, lambda: bentoml.get_current_service().engine, app)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._bentoml if scope["type"] == "lifespan" else self._app
        await app(scope, receive, send)


# The decorator has no types: mypy takes the service for its class.
OpenWorld.add_asgi_middleware(Frontend)  # type: ignore[attr-defined]


def _set_environment(settings: Settings) -> None:
    """Set the variables that the workers inherit; they may run in another directory."""
    request_large_pages(os.environ)
    chosen = "bundle" if settings.bundles is None else "bundles"
    for name in (chosen, "quarantine_url", "quarantine_images"):
        if value := getattr(settings, name):
            os.environ[variable(name)] = str(value)
