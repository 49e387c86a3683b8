"""One JSON object a line: what a worker says, and a line for each request.

Lines about requests are gathered and written a few times a second, after the answers are on the way; a worker that is
killed may lose the last of them. All else is written at once.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
import warnings
from functools import lru_cache
from typing import TextIO

from serving.errors import shortened

PERIOD = 0.25
"""Seconds between two writes of lines about requests."""

_encode = json.JSONEncoder(separators=(",", ":")).encode


class JsonFormatter(logging.Formatter):
    """A log record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": timestamp(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (request_id := getattr(record, "request_id", None)) is not None:
            line["request_id"] = request_id
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return _encode(line)


def log_as(form: str) -> None:
    """Let every handler that BentoML has set up write in `form`: json, or text as BentoML does; warnings too."""
    logging.captureWarnings(True)
    # About callers' files, and each in words of its own: what is wrong with a file is in the caller's answer.
    warnings.filterwarnings("ignore", module=r"PIL\.")
    if form == "json":
        loggers = [logging.getLogger(name) for name in (None, "bentoml", "uvicorn.error", "circus")]
        for handler in {handler for logger in loggers for handler in logger.handlers}:
            handler.setFormatter(JsonFormatter())


def timestamp(seconds: float) -> str:
    """UTC, to the millisecond."""
    return f"{_to_the_second(int(seconds))}.{int(seconds % 1 * 1000):03d}Z"


@lru_cache(maxsize=4)
def _to_the_second(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))


class RequestLog:
    """Lines about requests; used on the event loop."""

    def __init__(self, form: str, output: TextIO | None = None) -> None:
        self._json = form == "json"
        self._output = output or sys.stdout
        self._lines: list[str] = []
        self._timer: asyncio.TimerHandle | None = None

    def add(self, request_id: str, method: str, path: str, status: int, seconds: float, error: str | None) -> None:
        """A request was answered."""
        now = timestamp(time.time())
        path = shortened(path)
        milliseconds = round(seconds * 1000, 3)
        if self._json:
            line = {
                "time": now,
                "level": "info" if status < 500 else "error",
                "logger": "openworld.request",
                "request_id": request_id,
                "method": method,
                "path": path,
                "status": status,
                "milliseconds": milliseconds,
            }
            if error:
                line["error"] = error
            self._lines.append(_encode(line))
        else:
            said = f" {error}" if error else ""
            self._lines.append(f"{now} {request_id} {method} {_encode(path)} {status}{said} {milliseconds} ms")
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(PERIOD, self.write)

    def write(self) -> None:
        """Write the lines that have gathered."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._lines:
            lines, self._lines = self._lines, []
            self._output.write("\n".join(lines) + "\n")
            self._output.flush()
