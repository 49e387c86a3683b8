"""A worker ends when the process that supervises it is gone.

After kill -9 of the supervisor, its workers would go on: they would keep the port, so that no other server could start,
and nobody would replace or stop them.
"""

from __future__ import annotations

import os
import signal
import threading

from serving.telemetry import log

INTERVAL = 0.5
"""Seconds between two looks."""


def end_with(supervisor: int, interval: float = INTERVAL) -> None:
    """Send SIGTERM to this process, which answers what it has accepted, once its parent is not this one any more.

    A process that is not a child of the supervisor is left alone.
    """
    if os.getppid() == supervisor:
        threading.Thread(target=_watch, args=(supervisor, interval), name="supervisor", daemon=True).start()


def _watch(supervisor: int, interval: float) -> None:
    pause = threading.Event()
    while os.getppid() == supervisor:
        pause.wait(interval)
    log.error("the supervisor %d is gone: this worker ends", supervisor)
    os.kill(os.getpid(), signal.SIGTERM)
