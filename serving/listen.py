"""A listening socket for each worker.

BentoML's workers inherit one from their supervisor. Of connections that come together one worker then takes them all,
and as the supervisor holds the socket open until the last worker is gone, whoever connects while the server ends waits
in vain. With a socket for each, at the same address, the kernel spreads the connections over the workers that are
ready; the socket of a worker that ends, or is killed, goes with it, and where nobody listens connections are refused.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys

log = logging.getLogger("bentoml.openworld")


def listen_alone(descriptor: int) -> None:
    """Put a socket of this process in place of the inherited one: same descriptor, same address, not yet listening.

    The inherited one keeps the port for the supervisor's next workers, and listens no more. Other systems than Linux do
    not spread connections over sockets, and keep the one that they have.
    """
    if sys.platform != "linux":
        return
    with socket.socket(fileno=os.dup(descriptor)) as inherited:
        if inherited.family not in (socket.AF_INET, socket.AF_INET6):
            return
        inherited.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        with socket.socket(inherited.family, socket.SOCK_STREAM) as own:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if own.family == socket.AF_INET6:
                only = inherited.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
                own.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only)
            try:
                own.bind(inherited.getsockname())
            except OSError as error:
                # Such as a port that only the supervisor may open.
                log.warning("this worker shares the socket of the others: %s", error)
                return
            # Another worker may have done so.
            with contextlib.suppress(OSError):
                inherited.shutdown(socket.SHUT_RD)
            os.dup2(own.fileno(), descriptor, inheritable=False)
