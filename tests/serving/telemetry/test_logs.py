from __future__ import annotations

import io
import json
import logging
import sys
import warnings

import pytest

from serving.telemetry.logs import JsonFormatter, RequestLog, configure_logging, timestamp


def record(message: str, *values: object, exc_info: object = None) -> logging.LogRecord:
    return logging.LogRecord("bentoml.openworld", logging.WARNING, "x.py", 1, message, values, exc_info)  # type: ignore[arg-type]


def test_a_record_is_one_line_of_json() -> None:
    line = JsonFormatter().format(record('two\nlines and a "%s"', "quote"))
    assert "\n" not in line
    parsed = json.loads(line)
    assert (parsed["level"], parsed["logger"]) == ("warning", "bentoml.openworld")
    assert parsed["message"] == 'two\nlines and a "quote"'


def test_a_traceback_stays_in_its_line() -> None:
    try:
        raise ValueError("reason")
    except ValueError:
        line = JsonFormatter().format(record("failed", exc_info=sys.exc_info()))
    assert "\n" not in line
    assert "ValueError: reason" in json.loads(line)["exception"]


def test_the_request_of_a_failure_is_named() -> None:
    failed = record("failed")
    assert "request_id" not in json.loads(JsonFormatter().format(failed))
    failed.request_id = "mine"
    assert json.loads(JsonFormatter().format(failed))["request_id"] == "mine"


def test_warnings_are_lines_of_json_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Except Pillow's warnings about uploaded files."""
    output = io.StringIO()
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.StreamHandler(output)])
    with warnings.catch_warnings():
        try:
            configure_logging("json")
            warnings.warn("look out", stacklevel=1)
            warnings.warn_explicit("a bomb", UserWarning, "Image.py", 1, module="PIL.Image")
        finally:
            logging.captureWarnings(False)
    (line,) = output.getvalue().splitlines()
    assert "look out" in json.loads(line)["message"]


def test_times_are_utc_to_the_millisecond() -> None:
    assert timestamp(0.0015) == "1970-01-01T00:00:00.001Z"
    assert timestamp(1704067199.999) == "2023-12-31T23:59:59.999Z"


@pytest.mark.parametrize("form", ["json", "text"])
def test_requests_are_lines_that_cannot_be_forged(form: str) -> None:
    output = io.StringIO()
    log = RequestLog(form, output)
    log.write("one", "POST", "/predict", 200, 0.0015, None)
    log.write("two", "GET", '/x\n{"level":"fake"}', 404, 0.001, "not_found")
    first, second = output.getvalue().splitlines()
    assert "one" in first
    assert "1.5" in first
    assert "not_found" in second
    if form == "json":
        assert json.loads(second)["path"] == '/x\n{"level":"fake"}'
        assert "error" not in json.loads(first)
