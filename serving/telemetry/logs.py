"""Log lines as JSON objects, and one line per request."""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from functools import lru_cache
from typing import TextIO

from serving.errors import shortened

_encode = json.JSONEncoder(separators=(",", ":")).encode


class JsonFormatter(logging.Formatter):
    """Formats a log record as one line of JSON."""

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


def configure_logging(form: str) -> None:
    """Set the format of every handler that BentoML installed: json, or text as BentoML writes it.

    Python warnings are logged, too.
    """
    logging.captureWarnings(True)
    # Pillow warns about callers' files in many different texts; the caller learns what is wrong from the response.
    warnings.filterwarnings("ignore", module=r"PIL\.")
    if form == "json":
        loggers = [logging.getLogger(name) for name in (None, "bentoml", "uvicorn.error", "circus")]
        for handler in {handler for logger in loggers for handler in logger.handlers}:
            handler.setFormatter(JsonFormatter())


def timestamp(seconds: float) -> str:
    """The time in UTC, to the millisecond."""
    return f"{_to_the_second(int(seconds))}.{int(seconds % 1 * 1000):03d}Z"


@lru_cache(maxsize=4)
def _to_the_second(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))


class RequestLog:
    """Writes one line per request."""

    def __init__(self, form: str, output: TextIO | None = None) -> None:
        self._json = form == "json"
        self._output = output or sys.stdout

    def write(self, request_id: str, method: str, path: str, status: int, seconds: float, error: str | None) -> None:
        """Log a request that was answered; `error` is the code of its error."""
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
            text = _encode(line)
        else:
            code = f" {error}" if error else ""
            text = f"{now} {request_id} {method} {_encode(path)} {status}{code} {milliseconds} ms"
        self._output.write(f"{text}\n")
        self._output.flush()
