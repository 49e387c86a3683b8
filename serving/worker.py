"""What a server starts as its workers: BentoML's own, without what no worker of ours uses."""

from __future__ import annotations

import gc
import math
import sys

from serving.lean import BY_WORKERS, leave_out
from serving.settings import Settings

GRACE = 2
"""Seconds beyond the deadline for clients to read what they were answered."""
_GRACE_OPTION = "--timeout-graceful-shutdown"

if __name__ == "__main__":
    # Until it serves, next to nothing that is made goes away again; the service turns it on.
    gc.disable()
    leave_out(BY_WORKERS)

    import uvicorn.config

    # No page of ours is a WebSocket.
    uvicorn.config.WS_PROTOCOLS["auto"] = None
    uvicorn.config.HTTP_PROTOCOLS["auto"] = "serving.protocol:BoundedProtocol"

    # A client that stops reading would keep a server that was told to go; whoever starts it may say otherwise.
    if _GRACE_OPTION not in sys.argv:
        sys.argv += [_GRACE_OPTION, str(math.ceil(Settings.from_environment().deadline) + GRACE)]

    from _bentoml_impl.worker.service import main

    main()
