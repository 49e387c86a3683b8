"""What a server starts as its workers: BentoML's own, without what no worker of ours uses.

BentoML imports most of itself before it imports a service, so that the service comes too late to leave anything out.
"""

from __future__ import annotations

import gc
import math
import sys

from serving.late import import_late
from serving.settings import Settings

GRACE = 2
"""Seconds beyond the deadline for clients to read what they were answered."""
_GRACE_OPTION = "--timeout-graceful-shutdown"

UNUSED = (
    # What talks to BentoML's cloud: a sixth of all modules that a worker would import.
    ("bentoml._internal.cloud",),
    ("bentoml._internal.cloud.client", "RestApiClient"),
    ("bentoml._internal.cloud.schemas.modelschemas", "LabelItemSchema", "ModelManifestSchema"),
    ("bentoml._internal.cloud.schemas.schemasv1", "CreateModelSchema"),
    ("httpx",),
    # What writes Dockerfiles.
    ("jinja2",),
    ("jinja2.loaders", "FileSystemLoader"),
    ("jinja2.sandbox", "SandboxedEnvironment"),
    # What starts workers: only a supervisor does.
    ("_bentoml_impl.server.serving", "serve_http"),
    ("uvicorn.supervisors", "ChangeReload", "Multiprocess"),
)
"""Modules with what others take from them by name."""

if __name__ == "__main__":
    # Until it serves, next to nothing that is made goes away again; the service turns it on.
    gc.disable()
    for unused in UNUSED:
        import_late(*unused)

    import uvicorn.config

    # No page of ours is a WebSocket.
    uvicorn.config.WS_PROTOCOLS["auto"] = None
    uvicorn.config.HTTP_PROTOCOLS["auto"] = "serving.protocol:BoundedProtocol"

    # A client that stops reading would keep a server that was told to go; whoever starts it may say otherwise.
    if _GRACE_OPTION not in sys.argv:
        sys.argv += [_GRACE_OPTION, str(math.ceil(Settings.from_environment().deadline) + GRACE)]

    from _bentoml_impl.worker.service import main

    main()
