"""A worker ends when the process that supervises it is gone.

After kill -9 of the supervisor, its workers would continue without anything to replace or stop them, and would keep the
port, so that no other server could start.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from pathlib import Path

from serving.telemetry import log

INTERVAL = 0.5
"""Seconds between two looks."""


def end_with(supervisor: int, interval: float = INTERVAL) -> None:
    """Send SIGTERM to this process, which answers what it has accepted, once its parent is not this one any more.

    A process that is not a child of the supervisor is left alone, unless the supervisor died while this one started.
    """
    if os.getppid() == supervisor or _is_gone(supervisor):
        threading.Thread(target=_watch, args=(supervisor, interval), name="supervisor", daemon=True).start()


def _is_gone(process: int) -> bool:
    with contextlib.suppress(OSError):
        # A zombie keeps its PID until its parent reaps it. The state follows the name in brackets.
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in ("Z", "X")
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


def _watch(supervisor: int, interval: float) -> None:
    pause = threading.Event()
    while os.getppid() == supervisor:
        pause.wait(interval)
    log.error("the supervisor %d is gone: this worker ends", supervisor)
    os.kill(os.getpid(), signal.SIGTERM)
