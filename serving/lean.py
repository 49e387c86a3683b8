"""What of BentoML the processes of a server leave out: to import it takes a good part of a start, and none uses it.

BentoML imports most of itself before it imports a service, so it must be told before that.
"""

from __future__ import annotations

from serving.late import import_late

BY_ALL = (
    # What talks to BentoML's cloud: a sixth of all modules.
    ("bentoml._internal.cloud",),
    ("bentoml._internal.cloud.client", "RestApiClient"),
    ("bentoml._internal.cloud.schemas.modelschemas", "LabelItemSchema", "ModelManifestSchema"),
    ("bentoml._internal.cloud.schemas.schemasv1", "CreateModelSchema"),
    ("httpx",),
    # What writes Dockerfiles.
    ("jinja2",),
    ("jinja2.loaders", "FileSystemLoader"),
    ("jinja2.sandbox", "SandboxedEnvironment"),
)
"""Modules with what others take from them by name."""

BY_WORKERS = (
    *BY_ALL,
    # What starts workers.
    ("_bentoml_impl.server.serving", "serve_http"),
    ("uvicorn.supervisors", "ChangeReload", "Multiprocess"),
)


def leave_out(modules: tuple[tuple[str, ...], ...]) -> None:
    for module in modules:
        import_late(*module)
